"""Every reader of files that rlprobe did not just write, by one name each."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe.capture import collector
from rlprobe.compare.match import rules
from rlprobe.compare.samples.run import open_side
from rlprobe.config import loading
from rlprobe.diagnose import diagnosis
from rlprobe.dumps import dumpjson, records, results, token_sketches
from rlprobe.dumps.key_data import KeyData
from rlprobe.dumps.tensors.tensorfile import map_file, read_tensor
from rlprobe.frameworks import switch
from rlprobe.frameworks.slime import user_config
from rlprobe.judge.inputs import Results
from rlprobe.rollouts import hdf5, vendor
from rlprobe.store.importing import import_bundle
from rlprobe.store.manifest import Manifest


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
    tensor = read_tensor(map_file(path), path.name)
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
    return records.read(path)


def _summary(path: Path) -> object:
    root = _placed(path, "summary.json")
    return results.summary(root), results.table(root)


def _vendor(path: Path) -> object:
    root = _placed(path, "data/prompts/step0/rank0/micro_step0/prompts.npy")
    for key in vendor.KEYS:
        place = root / f"data/{key}/step0/rank0/micro_step0/{key}.npy"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    return vendor.read_step(root, 0)


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
    "pt": _tensor,
    "manifest": lambda path: Manifest.from_bytes(path.read_bytes(), path.name),
    "bundle": _bundle,
    "rollouts": hdf5.read,
    "vendor": _vendor,
    "records": _records,
    "summary": _summary,
    "sketches": lambda path: token_sketches._part(path, 0, 0),
    "keydata": _key_data,
    "proof": _proof,
    "diagnosis": diagnosis.read,
    "plan": lambda path: Results.open(_placed(path, "alignment.json")),
}
