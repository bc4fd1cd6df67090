"""Every reader of files that rlprobe did not just write, by one name each."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe.capture import collector
from rlprobe.compare.match import rules
from rlprobe.compare.samples.run import open_side
from rlprobe.config import loading
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.gate import configuration
from rlprobe.dumps import (
    construct,
    dumpjson,
    logical,
    parquet,
    records,
    results,
    routing,
    token_sketches,
)
from rlprobe.dumps.key_data import KeyData
from rlprobe.dumps.tensors.tensorfile import map_file, read_tensor
from rlprobe.errors import DumpError, StoreError
from rlprobe.frameworks import switch
from rlprobe.frameworks.slime import user_config
from rlprobe.judge.inputs import Results
from rlprobe.refine import refined, suspects, trace
from rlprobe.report import side_by_side
from rlprobe.rollouts import hdf5, vendor
from rlprobe.store import alignments, keys
from rlprobe.store.importing import import_bundle
from rlprobe.store.manifest import File, Manifest
from rlprobe.store.read import Run


def _placed(path: Path, place: str) -> Path:
    """A directory that holds the file at ``place``, alone."""
    root = path.parent / f"{path.name}.d"
    shutil.rmtree(root, ignore_errors=True)
    (root / place).parent.mkdir(parents=True)
    shutil.copyfile(path, root / place)
    return root


def _msprobe(path: Path) -> object:
    found = switch.read(path)
    return user_config.session(path, {}) if found.kind == "msprobe" else found


def _session(path: Path) -> object:
    found = switch.read(path)
    return found.session


def _bundle(path: Path) -> object:
    return import_bundle(path.parent / f"{path.name}.store", path)


def _tensor(path: Path) -> float:
    data = map_file(path)
    tensor = read_tensor(data, "f.pt" if bytes(data[:2]) == b"PK" else path.name)
    return sum(block.nbytes for block in tensor.blocks(1 << 16)) if tensor.size < 1 << 24 else 0


def _key_data(path: Path) -> object:
    place = "data/responses/step0/rank0/micro_step0/responses"
    return KeyData(_placed(path, place + path.suffix) / "data").arrays("responses", 0)


def _proof(path: Path) -> object:
    root = _placed(path, "mock_proof.json")
    (root / "data").mkdir()
    side = open_side(root)
    assert side is not None
    return [side.order(stage, 0) for stage in ("actor_update", "critic_update")]


def _records(path: Path) -> pl.DataFrame:
    # as a table comes in from elsewhere: one that ends the process that reads it is refused
    found = parquet.try_apart([path])
    if found is not None:
        raise StoreError(f"{path}: {found[1]}")
    return records.read(path)


def _summary(path: Path) -> object:
    root = _placed(path, "summary.json")
    found = results.summary(root)
    with contextlib.suppress(DumpError):  # there is no table beside it
        results.table(root)
    return found


def _vendor(path: Path) -> object:
    root = _placed(path, "data/prompts/step0/rank0/micro_step0/prompts.npy")
    for key in vendor.KEYS:
        place = root / f"data/{key}/step0/rank0/micro_step0/{key}.npy"
        place.parent.mkdir(parents=True, exist_ok=True)
        if key != "prompts":  # prompts and responses together are as long as the others
            np.save(place, np.ones((3, 4 if key == "responses" else 8), np.int64))
    return vendor.read_step(root, 0)


def _run(path: Path, name: str) -> Run:
    """A run that has this one file, with its digest in the manifest: whoever made it vouches."""
    root = _placed(path, name)
    data = (root / name).read_bytes()
    said: dict[str, Any] = {
        "path": name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
    }
    (root / "manifest.json").write_text(json.dumps({"key": "", "files": [said]}))
    files = [File.model_construct(**said)]
    return Run(
        root, root, Manifest.model_construct(key="", role="target", declared={}, files=files)
    )


def _metrics(path: Path) -> object:
    run = _run(path, "metrics.jsonl")
    rows = side_by_side.metrics(run, run, {})
    return rows, side_by_side.curves(rows, 0, [])


def _environment(path: Path) -> object:
    run = _run(path, "environment.json")
    return side_by_side.environment(run, run)


def _trace(path: Path) -> object:
    found = trace.read(path)
    assert found is not None
    values = [*found.outputs, *(value for op in found.operators for value in op.inputs)]
    return [found.live(), *(trace.error(value, value) for value in values)]


def _about(path: Path) -> object:
    root = _placed(path, "data/responses/step0/rank0/micro_step0/responses.json")
    array = root / "data/responses/step0/rank0/micro_step0/responses.npy"
    array.write_bytes(_ARRAY)
    return KeyData(root / "data").arrays("responses", 0)


def _suspects(path: Path) -> object:
    return suspects.read(_placed(path, "refine/suspects.json"))


def _safetensors(path: Path) -> str:
    # below a megabyte all of it counts, and nobody looks into it
    os.truncate(path, max(path.stat().st_size, (1 << 20) + 64))
    return keys.model_id(path)


def _two_places(path: Path) -> object:
    shutil.copyfile(path, path.with_name("f.json"))
    return alignments.load(path.with_name("f.json"))


_ARRAY = (
    b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': (4,), }".ljust(79)
    + b"\n" + bytes(32)
)  # fmt: skip

#: The first word of a corpus file's name -> what reads it.
READERS: dict[str, Callable[[Path], Any]] = {
    "yaml": loading.load,
    "laughs": loading.load,
    "collector": collector.read,
    "rules": rules.load,
    "msprobe": _msprobe,
    "session": _session,
    "dump": dumpjson.read,
    "stack": records.read_stack,
    "construct": construct.read,
    "pt": _tensor,
    "manifest": lambda path: Manifest.from_bytes(path.read_bytes(), path.name),
    "bundle": _bundle,
    "rollouts": hdf5.read,
    "vendor": _vendor,
    "records": _records,
    "summary": _summary,
    "safetensors": _safetensors,
    "sketches": lambda path: token_sketches._part(path, 0, 0),
    "coordinates": lambda path: logical._part(path, 0, 0),
    "routing": lambda path: routing.part(path, 0, 0),
    "keydata": _key_data,
    "proof": _proof,
    "diagnosis": diagnosis.read,
    "plan": lambda path: Results.open(_placed(path, "alignment.json")),
    "sides": lambda path: results.sides(_placed(path, "sides.json")),
    "suspects": _suspects,
    "refined": lambda path: refined.read(_placed(path, "refine/refined.json")),
    "record": _two_places,
    "trace": _trace,
    "metrics": _metrics,
    "environment": _environment,
    "configurations": lambda path: configuration.of_run(_run(path, "dump/configurations.json")),
    "about": _about,
}
#: Words for what another reader reads.
ALIASES = {"laughs": "yaml"}
#: What files of a reader are called, where it goes by that.
SUFFIXES = {
    **dict.fromkeys(("pt", "keydata", "vendor"), ".npy"),
    "records": ".parquet",
    "safetensors": ".safetensors",
    "sketches": ".npz",
    "coordinates": ".npz",
    "routing": ".npz",
}
