"""Reads a rollout file that may be damaged or hostile.

Each object is checked before a byte of it is read: only hard links, only groups and datasets of the
layout, only contiguous fixed-size integers and floats that lie in this file, and never more bytes
than the file holds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import h5py
import numpy as np

from rlprobe import formats
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ReplayError
from rlprobe.rollouts.hdf5_layout import FORMAT, JSON_PARTS, VERSION, digest
from rlprobe.rollouts.model import NAME, Ragged, Rollouts, Sample

#: No JSON part of a step is near this; a larger one is refused before it is read.
MAX_JSON_BYTES = 1 << 30
MAX_AXES = 16
_COLUMN_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


class Reader:
    """Reads one open file of ``size`` bytes; every complaint is a ReplayError naming ``path``."""

    def __init__(self, file: h5py.File, path: str, size: int) -> None:
        self.file = file
        self.path = path
        self.size = size

    def fail(self, what: str) -> ReplayError:
        return ReplayError(f"rollouts {self.path}: {what}")

    def rollouts(self) -> Rollouts:
        if self.attribute(self.file, "format", "S") != FORMAT:
            raise self.fail("attribute 'format' does not say rlprobe-rollouts")
        version = self.attribute(self.file, "version", "i")
        formats.check(int(version), (VERSION,), f"rollouts {self.path}", ReplayError)
        self.members(self.file, {"index", "json", "tensors"})
        index = self.index()
        named = index["tensors"]
        digests = index["digests"]

        self.members(self.group("json"), set(JSON_PARTS))
        parts = {name: self.json(f"json/{name}", digests) for name in JSON_PARTS}
        tensors: dict[str, np.ndarray | Ragged] = {}
        dtypes: dict[str, str] = {}
        self.members(self.group("tensors"), set(named))
        for name, entry in named.items():
            tensors[name] = self.tensor(name, entry, digests, dtypes)
        self.types(parts)
        result = Rollouts(
            step=index["step"],
            trainer_step=index["trainer_step"],
            tensors=tensors,
            dtypes=dtypes,
            values=parts["values"],
            value_dtypes=parts["value_dtypes"],
            meta=parts["meta"],
            sampling=parts["sampling"],
            samples=[self.sample(raw) for raw in parts["samples"]],
        )
        if index["rows"] != len(result):
            raise self.fail(f"the index says {index['rows']} rows, samples are {len(result)}")
        try:
            result.check()
        except ReplayError as error:
            raise self.fail(str(error)) from error
        return result

    def index(self) -> dict[str, Any]:
        array = self.dataset("index")
        declared = self.attribute(self.file["index"], "sha256", "S")
        if digest("index", array).encode() != declared:
            raise self.fail("'index' does not match its sha256; the file is damaged")
        index = self.parse("index", array)
        kinds = {"step": int, "trainer_step": int, "rows": int, "tensors": dict, "digests": dict}
        if not isinstance(index, dict) or set(index) != set(kinds):
            raise self.fail("'index' does not have the members of this format")
        for key, kind in kinds.items():
            if not isinstance(index[key], kind) or isinstance(index[key], bool):
                raise self.fail(f"'index' has a {key} that is no {kind.__name__}")
        for name, entry in index["tensors"].items():
            if not NAME.fullmatch(name):
                raise self.fail(f"{name!r} cannot name a tensor")
            if (
                not isinstance(entry, dict)
                or set(entry) != {"kind", "dtype"}
                or entry["kind"] not in ("dense", "ragged")
                or not isinstance(entry["dtype"], str)
            ):
                raise self.fail(f"'index' describes tensor {name!r} in an unknown way")
        return index

    def attribute(self, owner: Any, name: str, kind: str) -> Any:
        if name not in owner.attrs:
            raise self.fail(f"attribute {name!r} is missing; this is not a rollout file")
        handle = owner.attrs.get_id(name)
        if handle.shape != () or handle.dtype.kind != kind or handle.dtype.itemsize > 256:
            raise self.fail(f"attribute {name!r} has an unknown type")
        value = owner.attrs[name]
        return bytes(value) if kind == "S" else int(value)

    def members(self, group: Any, wanted: set[str]) -> None:
        here = group.name.rstrip("/")
        found = set(group)
        for name in sorted(wanted - found):
            raise self.fail(f"{here}/{name} is missing")
        for name in sorted(found - wanted):
            raise self.fail(f"{here}/{name} does not belong there")
        for name in found:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise self.fail(f"{here}/{name} is a link, which is refused")

    def group(self, name: str) -> Any:
        found = self.file[name]
        if not isinstance(found, h5py.Group):
            raise self.fail(f"/{name} is not a group")
        return found

    def dataset(self, name: str, most: int | None = None) -> np.ndarray:
        found = self.file[name]
        if not isinstance(found, h5py.Dataset):
            raise self.fail(f"/{name} is not a dataset")
        kind = found.id.get_type()
        plain = isinstance(kind, (h5py.h5t.TypeIntegerID, h5py.h5t.TypeFloatID))
        if not plain or found.dtype.kind not in "iuf" or found.dtype.itemsize > 8:
            raise self.fail(f"/{name} has element type {found.dtype}, which is refused")
        creation = found.id.get_create_plist()
        if creation.get_external_count():
            raise self.fail(f"/{name} keeps its data in another file, which is refused")
        # Neither virtual nor chunked, and only chunks can be compressed.
        if creation.get_layout() != h5py.h5d.CONTIGUOUS:
            raise self.fail(f"/{name} is not stored contiguously, which is refused")
        if len(found.shape or ()) == 0 or len(found.shape) > MAX_AXES:
            raise self.fail(f"/{name} has {len(found.shape or ())} axes, which is refused")
        size = found.dtype.itemsize
        for extent in found.shape:
            size *= int(extent)
        # A file can claim any shape; only what it really holds is ever allocated.
        stored = found.id.get_storage_size()
        if size > (self.size if most is None else min(self.size, most)) or size != stored:
            raise self.fail(f"/{name} claims {size} bytes and holds {stored}; it is refused")
        return np.asarray(found[...])

    def verified(self, name: str, digests: dict[str, Any], most: int | None = None) -> np.ndarray:
        array = self.dataset(name, most)
        if digests.get(name) != digest(name, array):
            raise self.fail(f"/{name} does not match its sha256; the file is damaged")
        return array

    def json(self, name: str, digests: dict[str, Any]) -> Any:
        return self.parse(name, self.verified(name, digests, MAX_JSON_BYTES))

    def parse(self, name: str, array: np.ndarray) -> Any:
        if array.dtype != np.uint8 or array.ndim != 1:
            raise self.fail(f"/{name} is not JSON bytes")
        try:
            return jsonfile.parse(array.tobytes(), nonfinite=True, any_text=True)
        except DocumentError as error:
            raise self.fail(f"/{name}: {error}") from error

    def tensor(
        self, name: str, entry: dict[str, str], digests: dict[str, Any], dtypes: dict[str, str]
    ) -> np.ndarray | Ragged:
        offsets = None
        if entry["kind"] == "ragged":
            self.members(self.group(f"tensors/{name}"), {"values", "offsets"})
            values = self.verified(f"tensors/{name}/values", digests)
            offsets = self.verified(f"tensors/{name}/offsets", digests)
        else:
            values = self.verified(f"tensors/{name}", digests)
        if entry["dtype"] == "bool":
            if values.dtype != np.uint8 or (values.size and values.max() > 1):
                raise self.fail(f"tensor {name!r} is not the bool it says it is")
            values = values.view(np.bool_)
        elif entry["dtype"] != values.dtype.name:
            # Rollouts.check compares it with the carriers it knows.
            dtypes[name] = entry["dtype"]
        if offsets is None:
            return values
        if offsets.dtype != np.int64:
            raise self.fail(f"/tensors/{name}/offsets is {offsets.dtype}, not int64")
        try:
            return Ragged(values, offsets)
        except ReplayError as error:
            raise self.fail(f"tensor {name!r}: {error}") from error

    def types(self, parts: dict[str, Any]) -> None:
        if not isinstance(parts["samples"], list):
            raise self.fail("/json/samples is not a list")
        for name in JSON_PARTS[1:]:
            if not isinstance(parts[name], dict):
                raise self.fail(f"/json/{name} is not a mapping")
        if not all(isinstance(column, list) for column in parts["values"].values()):
            raise self.fail("/json/values holds something that is not a column")
        for name, dtype in parts["value_dtypes"].items():
            if dtype not in _COLUMN_DTYPES:
                raise self.fail(f"column {name!r} has unknown element type {dtype!r}")

    def sample(self, raw: Any) -> Sample:
        names = {f.name for f in dataclasses.fields(Sample)}
        if not isinstance(raw, dict) or set(raw) != names:
            raise self.fail("a sample does not have the members of this format")
        reward = raw["reward"]
        if reward is not None and (
            isinstance(reward, bool) or not isinstance(reward, (int, float))
        ):
            raise self.fail(f"sample {raw['id']!r} has reward {reward!r}, which is no number")
        if not all(isinstance(raw[name], str) for name in names - {"reward"}):
            raise self.fail(f"sample {raw['id']!r} has a member that is not text")
        return Sample(**{**raw, "reward": None if reward is None else float(reward)})
