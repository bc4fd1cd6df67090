"""Inputs made of good ones, by their structure: keys, values, tags, bytes, lengths and places.

tests/soak runs them: a fixed sample with the other tests, for minutes with make soak.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import RlprobeError
from tests.unit.hostile.readers import READERS

CORPUS = Path(__file__).parent / "corpus"
#: What a file may hold instead of what belongs there.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**50, 1e308, -0.0, 1e-320),
    *("", "x", "\x00", "\x1b[31m", "\ud800", "é\u202e", "../../x", "/etc/passwd", "None", "1e999"),
    *(float("nan"), float("inf"), float("-inf"), "9" * 5000, "x" * 20_000),
    *([], {}, [[]], [None], {"": None}, {"x": {"x": []}}, ["x"] * 300, [[[[[[[[[[1]]]]]]]]]]),
)
#: Texts put into a text, where it may be anywhere.
PIECES = (
    *("[" * 3000, "{" * 3000, '{"a":' * 500, "&a [*a]", "!!bool 3", "!!int x"),
    *("!!timestamp 2026-13-45", '"\\ud800"', '"\\UFFFFFFFF"', "9" * 5000, "NaN", "-Infinity"),
    *("\x00", "\x1b", "%YAML 9.9\n---\n"),
    *("<<: *a", "? [a]", "- " * 500, "\t", "\r", "\ufeff", "'", '"', "\\", ",", ":", "\n", "e999"),
)  # fmt: skip


@dataclass
class Tally:
    """What became of the inputs."""

    inputs: int = 0
    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    slowest: str = ""
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        return (
            f"fuzz: {self.inputs} inputs, {self.read} read, {self.refused} refused, "
            f"{len(self.failures)} tracebacks, slowest {self.slowest_s:.2f} s ({self.slowest})"
        )


def seeds(place: Path) -> dict[str, list[tuple[bytes, Any]]]:
    """Good inputs by reader with their structure, and once bad ones without.

    ``place`` is a directory to make some in.
    """
    found: dict[str, list[bytes]] = {name: [] for name in READERS}
    root = Path(__file__).resolve().parents[3]
    found["yaml"].append((root / "config/config.yaml").read_bytes())
    found["collector"].append((root / "config/precision_collector.yaml").read_bytes())
    found["rules"].append((root / "rlprobe/compare/match/rules.yaml").read_bytes())
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "Max": 1.0}
    leaf |= {"Min": -1.0, "Mean": 0.0, "Norm": 2.0, "requires_grad": False, "data_name": "a.pt"}
    call = {"input_args": [leaf, [leaf, None]], "input_kwargs": {"x": leaf}, "output": [leaf]}
    call["parameters"] = {"weight": leaf}
    name = "Module.a.Linear.forward.0"
    found["dump"].append(
        json.dumps({"task": "tensor", "level": "L0", "data": {name: call}}).encode()
    )
    found["stack"].append(json.dumps({"0": [[name], ["File a, line 3, in f"]]}).encode())
    found["session"].append(
        json.dumps({"format": 1, "role": "target", "framework": "verl", "dump": "d", "side": "s",
                    "capture": {"engine": "light", "stages": ["actor_update"]},
                    "replay": None}).encode()
    )  # fmt: skip
    found["proof"].append(
        json.dumps({"format": 1, "samples": [{"step": 0, "stage": "actor_update", "rank": 0,
                                              "samples": ["sha256:" + "a" * 64]}]}).encode()
    )  # fmt: skip
    cause = {"class": "unknown", "known": "unknown", "statement": "s", "evidence": []}
    found["diagnosis"].append(
        json.dumps({"format": 2, "verdict": "aligned", "sentence": "s", "gate": [], "first": None,
                    "cause": cause, "extent": {}, "curves": [], "stages": [], "noise": {},
                    "coverage": {"benchmark": 1.0, "target": 1.0}}).encode()
    )  # fmt: skip
    found["plan"].append(
        json.dumps({"format": 1, "name": "a", "store": "store",
                    "runs": {"target": {"key": "a" * 64}},
                    "pairs": {"target": {"benchmark": "benchmark", "target": "target",
                                         "stages": ["actor_update"]}}}).encode()
    )  # fmt: skip
    found["summary"].append(json.dumps({"format": 1, "records": 1, "tables": {}}).encode())
    for kind in ("pt", "keydata", "vendor"):
        for array in (np.arange(12).reshape(3, 4), np.zeros((2, 0), np.float32), np.ones(3) > 0):
            buffer = io.BytesIO()
            np.save(buffer, array)
            found[kind].append(buffer.getvalue())
    import polars as pl

    from rlprobe.dumps import records

    table = pl.DataFrame(schema=records.SCHEMA)
    table.write_parquet(place / "records.parquet")
    found["records"].append((place / "records.parquet").read_bytes())
    found["rollouts"].append(_rollouts(place / "step0.h5"))
    buffer = io.BytesIO()
    np.savez(
        buffer, names=np.array(["a"]), name=np.zeros(1, np.int32), micro_step=np.zeros(1, np.int32),
        sample=np.zeros(1, np.int32), token=np.zeros(1, np.int32),
        sketch=np.zeros((1, 61), np.float32), k=np.int32(61), left_out=np.int64(0),
    )  # fmt: skip
    found["sketches"].append(buffer.getvalue())
    known = {
        name: [(data, structure(data) if len(data) < 50_000 else None) for data in several]
        for name, several in found.items()
    }
    for path in sorted(CORPUS.iterdir()):
        known[path.name.partition("-")[0]].append((path.read_bytes(), None))
    return {name: several for name, several in known.items() if several}


def _rollouts(path: Path) -> bytes:
    from rlprobe.rollouts import Rollouts, Sample, hdf5, sample_ids

    ids = sample_ids(0, ["sha256:aa"])
    hdf5.write(
        path,
        Rollouts(
            step=0, trainer_step=1,
            tensors={"responses": np.arange(3, dtype=np.int64).reshape(1, 3)},
            values={"uid": ["a"]}, meta={}, sampling={},
            samples=[Sample.build(ids[0], "sha256:aa", [1], [2], "p", "r", 1.0)],
        ),
    )  # fmt: skip
    return path.read_bytes()


def mutated(seed: tuple[bytes, Any], rng: random.Random) -> bytes:
    """One input: its structure changed where it has one, else its bytes."""
    data, value = seed
    if value is None or rng.random() < 0.4:
        return _bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if isinstance(value, dict | list):
            value = _changed(value, rng)
    # JSON is YAML as well
    return json.dumps(value).encode()


def structure(data: bytes) -> Any:
    """What a good input says; None where it is no text of a structure."""
    for parse in (json.loads, yaml.safe_load):
        with contextlib.suppress(Exception):
            value = parse(data)
            if isinstance(value, dict | list):
                return value
    return None


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with one node of it replaced, dropped, doubled, renamed or wrapped."""
    value = copy.deepcopy(value)
    nodes: list[tuple[Any, Any]] = []
    pending = [value]
    while pending and len(nodes) < 5000:
        node = pending.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in items:
            nodes.append((node, key))
            if isinstance(child, dict | list):
                pending.append(child)
    if not nodes:
        return rng.choice(ODD)
    parent, key = rng.choice(nodes)
    action = rng.randrange(6)
    if action == 0 and isinstance(parent, dict):
        parent[str(rng.choice(ODD))[:100]] = parent.pop(key)
    elif action == 1:
        del parent[key]
    elif action == 2:
        for _ in range(rng.choice((1, 10, 70))):
            parent[key] = [parent[key]] if rng.random() < 0.5 else {"x": parent[key]}
    elif action == 3:
        other, place = rng.choice(nodes)
        with contextlib.suppress(KeyError, IndexError):
            parent[key] = copy.deepcopy(other[place])
    else:
        parent[key] = copy.deepcopy(rng.choice(ODD))
    return value


def _bytes(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(found) + 1)
        action = rng.randrange(6)
        if action == 0:
            found[at:at] = rng.choice(PIECES).encode("utf-8", "surrogatepass")
        elif action == 1:
            del found[at : at + rng.choice((1, 4, 64, len(found)))]
        elif action == 2:
            found[at:at] = found[at : at + rng.choice((1, 16, 256))]
        elif action == 3:
            found[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), (2**62).to_bytes(8, "little")))
        elif found and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
    return bytes(found)


_SUFFIX = {
    "pt": ".npy",
    "keydata": ".npy",
    "vendor": ".npy",
    "records": ".parquet",
    "sketches": ".npz",
}


def run(
    inputs: int, seed: int, until: Callable[[], bool] = lambda: False, only: str | None = None
) -> Tally:
    """Give ``inputs`` inputs to the readers in turn; what is neither read nor refused is kept."""
    rng, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        known = {k: v for k, v in seeds(place).items() if only in (None, k)}
        names = sorted(known)
        for number in range(inputs):
            if until():
                break
            name = names[number % len(names)]
            data = mutated(rng.choice(known[name]), rng)
            path = place / f"f{_SUFFIX.get(name, '')}"
            path.write_bytes(data)
            began = time.monotonic()
            tally.inputs += 1
            try:
                READERS[name](path)
                tally.read += 1
            except (RlprobeError, TensorFileError) as error:
                str(error).encode("utf-8", "backslashreplace")
                tally.refused += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                kept = (
                    Path(tempfile.mkdtemp(prefix="fuzz-")) / f"{name}-{seed}-{number}{path.suffix}"
                )
                kept.write_bytes(data)
                tally.failures.append(f"{name}: {type(error).__name__}: {error!s:.150} ({kept})")
            spent = time.monotonic() - began
            if spent > tally.slowest_s:
                tally.slowest_s, tally.slowest = spent, f"{name} {seed} {number}"
    return tally
