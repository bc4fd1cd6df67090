"""Rollouts in HDF5, format 1.

    /               attributes ``format`` = b"rlprobe-rollouts", ``version`` = 1
    /index          JSON: step, trainer_step, rows, tensors {name: {kind, dtype}}, digests {dataset}
    /json/{samples,values,value_dtypes,meta,sampling}      JSON
    /tensors/NAME                                          kind "dense": array [rows, …]
    /tensors/NAME/{values,offsets}                         kind "ragged"

JSON is UTF-8 bytes in a uint8 dataset (Python's dialect: NaN and Infinity may occur). Every dataset
is contiguous, uncompressed and of a fixed-size integer or float type, and its sha256 over path,
type, shape and bytes stands in the index; the index's own stands in its attribute. The reader
accepts nothing else: a file is checked before a byte of a dataset is read, and it never follows a
link out of the file.

Writing the same content twice with one HDF5 version gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rlprobe.errors import ReplayError
from rlprobe.files import written
from rlprobe.rollouts.hdf5_layout import FORMAT, JSON_PARTS, VERSION, digest
from rlprobe.rollouts.hdf5_reader import Reader
from rlprobe.rollouts.model import Ragged, Rollouts


def write(path: str | os.PathLike[str], rollouts: Rollouts) -> None:
    """Write one step; the file appears whole or not at all.

    Raises:
        ReplayError: the rollouts are inconsistent or hold something JSON cannot; nothing is left.
    """
    rollouts.check()
    # "earliest" keeps files readable by the HDF5 1.10 that old images carry; locks are off
    # because shared cluster file systems often refuse them and nobody else has this name.
    with (
        written(Path(path), durable=True) as temporary,
        h5py.File(temporary, "w", libver="earliest", locking=False) as file,
    ):
        _write_content(file, rollouts)


def read(path: str | os.PathLike[str]) -> Rollouts:
    """Read and verify one step.

    Raises:
        ReplayError: the file is missing, not of this format and version, damaged, or holds
            anything the format does not have.
    """
    if Path(path).is_dir():
        raise ReplayError(f"rollouts {path}: a directory; give a step{{N}}.h5 in it")
    try:
        size = Path(path).stat().st_size
        with h5py.File(path, "r", locking=False) as file:
            return Reader(file, os.fspath(path), size).rollouts()
    except FileNotFoundError as error:
        raise ReplayError(f"rollouts {path}: no such file") from error
    # h5py reports a damaged structure as any of these, depending on where it met it.
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise ReplayError(f"rollouts {path}: not a readable rollout file ({error})") from error


def steps(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Recorded steps in a directory of ``step{N}.h5`` files, in order."""
    found = {}
    for entry in Path(directory).glob("step*.h5"):
        number = entry.name[len("step") : -len(".h5")]
        if number.isascii() and number.isdigit():
            found[int(number)] = entry
    return dict(sorted(found.items()))


def _write_content(file: h5py.File, rollouts: Rollouts) -> None:
    digests: dict[str, str] = {}

    def put(name: str, array: np.ndarray) -> None:
        array = _storable(array, name)
        file.create_dataset(name, data=array, track_times=False)
        digests[name] = digest(name, array)

    tensors = {}
    file.create_group("tensors")
    for name in sorted(rollouts.tensors):
        tensor = rollouts.tensors[name]
        if isinstance(tensor, Ragged):
            put(f"tensors/{name}/values", tensor.values)
            put(f"tensors/{name}/offsets", tensor.offsets)
        else:
            put(f"tensors/{name}", tensor)
        values = tensor.values if isinstance(tensor, Ragged) else tensor
        tensors[name] = {
            "kind": "ragged" if isinstance(tensor, Ragged) else "dense",
            "dtype": rollouts.dtypes.get(name, values.dtype.name),
        }
    parts = {
        "samples": [dataclasses.asdict(sample) for sample in rollouts.samples],
        "values": rollouts.values,
        "value_dtypes": rollouts.value_dtypes,
        "meta": rollouts.meta,
        "sampling": rollouts.sampling,
    }
    for name in JSON_PARTS:
        put(f"json/{name}", _json_bytes(parts[name], name))
    index = {
        "step": rollouts.step,
        "trainer_step": rollouts.trainer_step,
        "rows": len(rollouts),
        "tensors": tensors,
        "digests": digests,
    }
    put("index", _json_bytes(index, "index"))
    file["index"].attrs["sha256"] = np.bytes_(digests["index"].encode())
    file.attrs["format"] = np.bytes_(FORMAT)
    file.attrs["version"] = np.int64(VERSION)


def _storable(array: np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype == np.bool_:
        # HDF5 has no bool; h5py's stand-in is an enum, which the reader would have to trust.
        array = array.view(np.uint8)
    if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
        raise ReplayError(f"{name}: element type {array.dtype} cannot be stored")
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _json_bytes(value: Any, name: str) -> np.ndarray:
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ReplayError(f"rollouts: {name} has no JSON form: {error}") from error
    return np.frombuffer(text.encode(), dtype=np.uint8)
