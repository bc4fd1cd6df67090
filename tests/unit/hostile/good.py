"""A good input of every reader of ``readers.py``, to make odd ones of."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlprobe.coordinates import GROUPS
from rlprobe.documents import seal
from rlprobe.sketch import K
from rlprobe.store.commit import commit
from rlprobe.store.exporting import export
from rlprobe.store.keys import run_key

ROOT = Path(__file__).resolve().parents[3]
CORPUS = Path(__file__).parent / "corpus"

_CAUSE = {"class": "unknown", "known": "unknown", "statement": "s", "evidence": []}
_KEY = "ab" * 32
_LEAF = {
    "type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "Max": 1.0, "Min": -1.0,
    "Mean": 0.0, "Norm": 2.0, "requires_grad": False, "data_name": "a.pt",
}  # fmt: skip
_NAME = "Module.a.Linear.forward.0"
_CALL = {
    "input_args": [_LEAF, [_LEAF, None]],
    "input_kwargs": {"x": _LEAF},
    "output": [_LEAF],
    "parameters": {"weight": _LEAF},
}
_VALUE = {
    "value": 1,
    "storage": 1,
    "dtype": "float32",
    "shape": [2],
    "norm": 1.0,
    "max": "nan",
    "sketch": "b64:" + "A" * 326 + "==",
}

#: Reader -> what a good document of its says.
DOCUMENTS: dict[str, Any] = {
    "dump": {"task": "tensor", "level": "L0", "data": {_NAME: _CALL}},
    "stack": {"0": [[_NAME], ["File a, line 3, in f"]]},
    "construct": {_NAME: None, "Torch.add.0.forward": [_NAME, 0], "Torch.sub.0.forward": _NAME},
    "session": {
        "format": 1, "role": "target", "framework": "verl", "dump": "d", "side": "s",
        "capture": {"engine": "light", "stages": ["actor_update"]}, "replay": None,
    },
    "proof": {
        "format": 1,
        "samples": [{"step": 0, "stage": "actor_update", "rank": 0,
                     "samples": ["sha256:" + "a" * 64]}],
    },
    "diagnosis": {
        "format": 2, "verdict": "aligned", "sentence": "s", "gate": [
            {"item": "weights", "state": "open", "evidence": "e", "action": ""}],
        "first": None, "cause": _CAUSE, "coverage": {"benchmark": 1.0, "target": 1.0}, "noise": {},
        "stages": [{"stage": "actor_update", "state": "aligned", "records": 1, "beyond": 0}],
        "extent": {}, "judged": "0" * 64, "of": {"alignment.json": "0" * 64},
    },
    "plan": {
        "format": 1, "name": "a", "store": "store",
        "runs": {"target": {"key": _KEY, "device": "cpu", "precision": "fp32"}},
        "pairs": {"target": {"benchmark": "benchmark", "target": "target",
                             "stages": ["actor_update"]}},
    },
    "summary": {
        "format": 2, "pair": "target", "stage": "actor_update", "counts": {"matched": 1},
        "compared": 1, "coverage": {"benchmark": 1.0, "target": 1.0},
        "max_error": 0.0, "steps": [0],
        "tables": {"records.parquet": {"format": 1, "sha256": "0" * 64, "size": 9, "rows": 1}},
    },
    "sides": {"format": 1, "benchmark": "/b", "target": "/t", "coverage": 0.9, "map_steps": {}},
    "suspects": {
        "format": 1, "benchmark": _KEY, "target": _KEY, "reason": "",
        "suspects": {"stage": "actor_update", "step": 0, "rank": 0, "modules": ["a"],
                     "micro_steps": [0], "record": _NAME, "samples": ["s"], "budget_mib": 1,
                     "trace": "module", "trace_module": "a"},
    },
    "refined": {
        "format": 2, "benchmark": _KEY, "target": _KEY, "refining": [_KEY], "stage": "actor_update",
        "record": _NAME, "repeated": True, "kept": 1, "left_out": 0, "bytes": 9, "error": 0.1,
        "cause": None, "law": "", "left": 1.0, "evidence": [], "tokens": [], "channels": [],
        "records": [],
    },
    "record": {"format": 2, "name": "f", "keys": [_KEY]},
    "configurations": {"trainer": {"lr": 1e-3}, "data": {"prompt_key": "p"}},
    "about": {"data": {"max": 1, "offsets": [0, 1, 4]}},
    "environment": {
        "format": 1,
        "processes": {"actor-rank0": {"versions": {"torch": "2.13.0"}, "threads": {"intra": 2},
                                      "variables": {"A": "1"}}},
    },
    "msprobe": {"task": "tensor", "dump_path": "d", "rank": [], "step": [0], "level": "L0",
                "async_dump": False, "tensor": {"scope": [], "list": [], "data_mode": ["all"]}},
}  # fmt: skip
#: Documents that carry the digest of all that they say.
SEALED = frozenset({"diagnosis", "plan", "summary", "sides", "suspects", "refined", "record"})
#: Documents of a line each.
LINES: dict[str, list[Any]] = {
    "trace": [
        {
            "record": "trace",
            "format": 1,
            "kind": "module",
            "module": "a",
            "device": "cpu",
            "versions": {"torch": "2"},
        },
        {"record": "call", "module": "a"},
        {
            "record": "operator",
            "n": 0,
            "name": "aten::mm",
            "site": "a.py:1",
            "arguments": [{"name": "x", "tensors": [_VALUE]}],
            "outputs": [_VALUE],
        },
        {"record": "outputs", "outputs": [_VALUE]},
        {"record": "again", "repeats": True, "difference": 0.0, "wide": [_VALUE]},
    ],
    "metrics": [
        {"format": 1},
        {"step": 0, "trainer_step": 1, "metrics": {"loss": 0.5, "actor/lr": 1e-6}},
    ],
}


def text_of(reader: str, said: Any) -> str:
    """A document as a file of its kind says it, sealed where files of its kind are."""
    if reader in LINES:
        return "".join(json.dumps(line) + "\n" for line in said)
    if reader in SEALED and isinstance(said, dict):
        said = seal.sealed(said)
    return json.dumps(said)


@functools.cache
def yaml_values() -> dict[str, Any]:
    """Reader of YAML -> what a good file of its says."""
    files = {"yaml": "config/config.yaml", "collector": "config/precision_collector.yaml",
             "rules": "rlprobe/compare/match/rules.yaml"}  # fmt: skip
    return {name: yaml.safe_load((ROOT / file).read_text()) for name, file in files.items()}


def _npy(*arrays: np.ndarray[Any, Any]) -> list[bytes]:
    found = []
    for array in arrays:
        buffer = io.BytesIO()
        np.save(buffer, array)
        found.append(buffer.getvalue())
    return found


def npz(arrays: dict[str, Any], compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of arrays as numpy makes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, array in arrays.items():
            data = array if isinstance(array, bytes) else _npy(np.asarray(array))[0]
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def sketches() -> dict[str, Any]:
    """The arrays of a good file of token sketches."""
    return {
        "names": np.array(["a"]), "name": np.zeros(1, np.int32),
        "micro_step": np.zeros(1, np.int32), "sample": np.zeros(1, np.int32),
        "token": np.zeros(1, np.int32), "sketch": np.zeros((1, 61), np.float32),
        "k": np.int32(61), "left_out": np.int64(0),
    }  # fmt: skip


def routing() -> dict[str, Any]:
    """The arrays of a good file of chosen experts, of two routers."""
    return {
        "modules": np.array(["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]),
        "experts": np.array([8, 4], np.int32),
        "module": np.array([0, 0, 1], np.int32),
        "token": np.array([1, 2**63 + 5, 1], np.uint64),
        "chosen": np.array([[0, 7], [2, 3], [3, -1]], np.int16),
        "left_out": np.int64(0),
    }


def coordinates() -> dict[str, Any]:
    """The arrays of a good file of records by coordinates, of two modules."""
    texts = {"module": "a b", "op": "Linear Linear", "direction": "forward backward",
             "slot": "output output", "dtype": "float32 float32"}  # fmt: skip
    whole = {"sequence": (0, 1), "count": (8, 8), "tokens": (2, 2), "calls": (1, 1),
             "first": (0, 0), "features": (4, 4), "width": (4, 4)}  # fmt: skip
    return {
        **{name: np.array(said.split()) for name, said in texts.items()},
        **{name: np.array(numbers, np.int64) for name, numbers in whole.items()},
        **{name: np.ones(2) for name in ("squares", "sum", "max", "min")},
        "identity": np.array([[1, 2], [3, 4]], np.int64),
        "sketch": np.ones((2, GROUPS, K)),
    }


#: The pickle of a tensor of 3 by 4, as torch.save writes it, an operation an item.
PICKLE: tuple[bytes, ...] = (
    b"\x80\x02", b"ctorch._utils\n_rebuild_tensor_v2\n", b"q\x00", b"(", b"(",
    b"X\x07\x00\x00\x00storage", b"q\x01", b"ctorch\nFloatStorage\n", b"q\x02",
    b"X\x01\x00\x00\x000", b"q\x03", b"X\x03\x00\x00\x00cpu", b"q\x04", b"K\x0c", b"t", b"q\x05",
    b"Q", b"K\x00", b"K\x03", b"K\x04", b"\x86", b"q\x06", b"K\x04", b"K\x01", b"\x86", b"q\x07",
    b"\x89", b"ccollections\nOrderedDict\n", b"q\x08", b")", b"R", b"q\t", b"t", b"q\n", b"R",
    b"q\x0b", b".",
)  # fmt: skip


def saved_tensor(pickle: bytes, data: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A ``.pt`` file with this pickle and storage."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", data)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()


#: Header of a good safetensors file.
SAFETENSORS = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def safetensors(header: bytes, length: int | None = None, data: bytes = bytes(32)) -> bytes:
    """A safetensors file; ``length`` is what it says of its header."""
    said = len(header) if length is None else length
    return struct.pack("<Q", said & (1 << 64) - 1) + header + data


@functools.cache
def run() -> tuple[str, bytes, bytes, dict[str, bytes]]:
    """A small run: its key, its manifest, a bundle of it, and its objects by digest."""
    from tests.unit.store.conftest import declare, write_scratch

    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        declared = declare("benchmark", name="fuzz")
        key = run_key(declared)
        scratch = write_scratch(place / "scratch", stages=("actor_update",), tensors=False)
        commit(scratch, place / "store", key, declared)
        export(place / "store", [key], place / "b.rlprobe")
        objects = (p for p in (place / "store/objects").rglob("*") if p.is_file())
        contents = [path.read_bytes() for path in objects]
        return (
            key,
            (place / "store/runs" / key / "manifest.json").read_bytes(),
            (place / "b.rlprobe").read_bytes(),
            {hashlib.sha256(data).hexdigest(): data for data in contents},
        )


@functools.cache
def records() -> Any:
    """The record table of the good dump (polars)."""
    from rlprobe.dumps import dumpjson
    from rlprobe.dumps import records as tables

    with tempfile.TemporaryDirectory() as directory:
        dump = Path(directory, "dump.json")
        dump.write_text(json.dumps(DOCUMENTS["dump"]))
        return tables.finish(dumpjson.read(dump), 0, 0)


def _parquet() -> bytes:
    from rlprobe.dumps import records as tables

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "records.parquet")
        tables.write(records(), path)
        return path.read_bytes()


@functools.cache
def rollouts() -> bytes:
    """A file of one step's rollouts."""
    from rlprobe.rollouts import Ragged, Rollouts, Sample, hdf5, sample_ids

    ids = sample_ids(0, ["sha256:aa"])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "step0.h5")
        hdf5.write(
            path,
            Rollouts(
                step=0, trainer_step=1,
                tensors={
                    "responses": np.arange(3, dtype=np.int64).reshape(1, 3),
                    "log_probs": Ragged(np.zeros(3, np.float32), np.array([0, 3], np.int64)),
                },
                values={"uid": ["a"]}, meta={}, sampling={},
                samples=[Sample.build(ids[0], "sha256:aa", [1], [2], "p", "r", 1.0)],
            ),
        )  # fmt: skip
        return path.read_bytes()


def _arrays() -> list[bytes]:
    return _npy(np.arange(12).reshape(3, 4), np.zeros((2, 0), np.float32), np.ones(3) > 0)


#: Reader -> its good inputs as bytes.
_BYTES: dict[str, Callable[[], list[bytes]]] = {
    "pt": lambda: [*_arrays(), saved_tensor(b"".join(PICKLE), bytes(48))],
    "keydata": _arrays,
    "vendor": lambda: _npy(np.arange(12).reshape(3, 4)),
    "sketches": lambda: [npz(sketches())],
    "coordinates": lambda: [npz(coordinates())],
    "routing": lambda: [npz(routing())],
    "safetensors": lambda: [safetensors(json.dumps(SAFETENSORS).encode())],
    "manifest": lambda: [run()[1]],
    "bundle": lambda: [run()[2]],
    "records": lambda: [_parquet()],
    "rollouts": lambda: [rollouts()],
}


@functools.cache
def inputs(reader: str) -> tuple[bytes, ...]:
    """Good inputs of a reader."""
    if reader in DOCUMENTS:
        return (text_of(reader, DOCUMENTS[reader]).encode(),)
    if reader in LINES:
        return (text_of(reader, LINES[reader]).encode(),)
    if reader in yaml_values():
        return (yaml.safe_dump(yaml_values()[reader]).encode(),)
    return tuple(_BYTES[reader]())
