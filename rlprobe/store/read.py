"""Runs of a store, opened for reading."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import polars as pl

from rlprobe import formats
from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.dumps import described, logical, places, proof, routing, token_sketches
from rlprobe.dumps.key_data import KeyData
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.errors import StoreError
from rlprobe.store import copies, listing, parts
from rlprobe.store.manifest import MAX_BYTES, NAME, Manifest

if TYPE_CHECKING:
    from rlprobe.rollouts.model import Rollouts

_KEY = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{4,64}")
#: Directory of a run with what its training had made of its models at the start of steps.
STATES = "states"
_STATE = re.compile(STATES + r"/step(\d{1,9})/[^/]+\.json")
_ROLLOUT = re.compile(r"rollouts/step(\d{1,9})\.h5")
#: The trainer's metrics, and the version that its first line says.
METRICS, METRICS_FORMAT = "metrics.jsonl", 1
#: Directories of which a store that holds anything has at least one.
_PARTS = ("runs", "objects", "alignments", "manifests")
#: What is in a store before its first run is committed, which a failed or killed one leaves so.
_BEGUN = frozenset({"tmp", "locks", "scratch"})
_BESIDE = frozenset({"logs", "assets"})
#: Sizes printed in a message before "and N more".
_SHOWN = 5
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Run:
    """One complete run."""

    store: Path
    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, store: Path, key: str) -> Run:
        """A run by its key or an unambiguous beginning of it (at least 4 digits).

        Raises:
            StoreError: there is none, there are several, or its manifest is damaged.
        """
        path = store / "runs" / resolve(store, key)
        manifest = Manifest.load(path)
        if manifest.key != path.name:
            raise StoreError(f"{path} holds the manifest of another run, {manifest.key}")
        return cls(store, path, manifest)

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def dump(self) -> Path:
        """The contract's tree; tensors below 1 MiB are packed in it (see ``tensors``)."""
        return self.path / "dump"

    def written(self, stage: str, step: int, rank: int) -> Path:
        """The directory of what one process wrote in one step of a stage; may be missing.

        Args:
            stage: canonical name; slime's own stands in its dump.
            step: captured step, from 0.
            rank: the process's.
        """
        return places.of_process(self.dump, stage, step, rank)

    @property
    def rollouts(self) -> dict[int, Path]:
        """Recorded rollouts by step."""
        matches = [_ROLLOUT.fullmatch(file.path) for file in self.manifest.files]
        found = {int(match[1]): self.path / match[0] for match in matches if match}
        return dict(sorted(found.items()))

    def generated(self, step: int) -> Rollouts | None:
        """What was generated for a step; None where the run has no rollouts of it.

        Raises:
            ReplayError: the file is damaged.
        """
        path = self.rollouts.get(step)
        if path is None:
            return None
        # Imported here: few commands read rollouts, and HDF5 loads slowly.
        from rlprobe.rollouts import hdf5

        return hdf5.read(path)

    @property
    def states(self) -> dict[int, Path]:
        """Directories with the models' state at the start of a step, by step."""
        matches = [_STATE.fullmatch(file.path) for file in self.manifest.files]
        steps = sorted({int(match[1]) for match in matches if match})
        return {step: self.path / STATES / f"step{step}" for step in steps}

    @property
    def is_joined(self) -> bool:
        """Whether it began each captured step from the benchmark's state (``controls.rejoin``)."""
        return self.manifest.declared.get("rejoin") is True and bool(self.manifest.parents)

    def joined(self) -> list[dict[str, Any]]:
        """What each process loaded of another run's state: role, rank, step and how it went."""
        return self._told("joined", described.joined)

    def optimizers(self) -> list[dict[str, Any]]:
        """What optimizers were told as they stepped (:func:`described.optimizers`)."""
        return self._told("optimizers", described.optimizers)

    def buffers(self) -> list[dict[str, Any]]:
        """What modules kept beside their parameters (:func:`described.buffers`)."""
        return self._told("buffers", described.buffers)

    def _told(self, name: str, read: Callable[[Any], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Lines of a document that has its own name in it; none where there is no such file."""
        found = self._json(f"{name}.json")
        if found is None:
            return []
        with self._described(f"{name}.json"):
            return read(found.get(name))

    def records(self, stage: str) -> Path:
        """The record table of a stage (canonical name).

        Raises:
            StoreError: the stage was not captured; the message lists those that were.
        """
        found = self.manifest.stages.get(stage)
        if found is None or found.state != "captured":
            captured = [n for n, s in self.manifest.stages.items() if s.state == "captured"]
            state = "was not captured" if found is None else f"was {found.state}"
            raise StoreError(
                f"run {self.key[:12]} ({self.manifest.role}): stage {stage} {state}; captured: "
                f"{', '.join(captured) or 'none'}"
            )
        return self.checked(f"records/{stage}.parquet")

    def checked(self, name: str) -> Path:
        """A file of the run, which is what the manifest says.

        Raises:
            StoreError: it is not, or is missing.
        """
        return listing.checked(self.path, name)

    def key_data(self) -> Path | None:
        """The directory of the run's key data, all of it checked; None where it has none.

        Raises:
            StoreError: a file is missing, changed or not of the run.
        """
        if not any(file.path.startswith("dump/data/") for file in self.manifest.files):
            return None
        return self._checked_data

    @functools.cached_property
    def _checked_data(self) -> Path | None:
        return listing.checked_below(self.path, "dump/data")

    @functools.cached_property
    def recorded(self) -> KeyData | None:
        """Its key data, named by its proof; None where it has none. Read once an opened run.

        Raises:
            StoreError: a file is missing, changed or not of the run.
        """
        data = self.key_data()
        return None if data is None else KeyData(data, self.mock_proof() or [])

    def token_sketches(self, stage: str) -> pl.DataFrame | None:
        """Sketches per token (columns: ``token_sketches.SCHEMA``), None where there are none.

        Raises:
            StoreError: the table is missing, damaged, or holds what capture does not write.
        """
        name = f"token_sketches/{stage}.parquet"
        table = self._table(name, token_sketches.SCHEMA)
        return None if table is None else token_sketches.require(table, f"{self.path}/{name}")

    def logical(self, stage: str) -> pl.DataFrame | None:
        """Records by coordinates (columns: ``logical.SCHEMA``), None where there are none.

        Raises:
            StoreError: the table is missing, damaged, or holds what capture does not write.
        """
        name = f"logical/{stage}.parquet"
        table = self._table(name, logical.SCHEMA)
        return None if table is None else logical.require(table, f"{self.path}/{name}")

    def routing(self, stage: str) -> pl.DataFrame | None:
        """Chosen experts per token (columns: ``routing.SCHEMA``), None where there are none.

        Raises:
            StoreError: the table is missing, damaged, or holds what capture does not write.
        """
        name = f"routing/{stage}.parquet"
        table = self._table(name, routing.SCHEMA)
        return None if table is None else routing.require(table, f"{self.path}/{name}")

    def weights(self) -> pl.DataFrame | None:
        """``weights.parquet`` (columns: ``parts.WEIGHTS``), None when weights were not digested.

        Raises:
            StoreError: the table is missing, damaged, or holds what capture does not write.
        """
        return self._parts("weights.parquet", parts.WEIGHTS)

    def gradients(self) -> pl.DataFrame | None:
        """``gradients.parquet`` (columns: ``parts.GRADIENTS`` and ``parts.COPIES``), None where the
        model's parts do.

        Raises:
            StoreError: the table is missing, damaged, or holds what capture does not write.
        """
        return self._parts("gradients.parquet", parts.GRADIENTS, parts.COPIES)

    def _parts(
        self, name: str, schema: dict[str, Any], later: Mapping[str, Any] = _NONE
    ) -> pl.DataFrame | None:
        table = self._table(name, schema, later)
        return None if table is None else parts.require(table, f"{self.path}/{name}")

    def mock_proof(self) -> list[proof.Entry] | None:
        """Entries of ``mock_proof.json``; None without one."""
        found = self._json(proof.NAME)
        if found is None:
            return None
        with self._described(proof.NAME):
            return proof.entries(found.get("samples"))

    def environment(self) -> dict[str, dict[str, Any]]:
        """Versions and settings by process, ``{role}-rank{R}``."""
        found = self._json("environment.json")
        if found is None:
            return {}
        with self._described("environment.json"):
            return described.environment(found.get("processes"))

    def metrics(self) -> list[dict[str, Any]]:
        """The trainer's metrics: step, trainer_step, metrics {name: number}."""
        if not self.has(METRICS):
            return []
        path = self.checked(METRICS)
        with self._described(METRICS):
            lines = read_bytes(path, MAX_BYTES).splitlines()
            rows = [jsonfile.mapping(jsonfile.parse(line, nonfinite=True)) for line in lines]
            if rows and "format" in rows[0]:  # runs committed before have no such line
                formats.check(rows.pop(0)["format"], (METRICS_FORMAT,), str(path), StoreError)
            return [described.metrics(row) for row in rows]

    @contextlib.contextmanager
    def _described(self, name: str) -> Iterator[None]:
        """Errors of a document of the run name its file."""
        try:
            yield
        except DocumentError as error:
            raise StoreError(f"{self.path / name} is damaged: {error}") from error

    def has(self, path: str) -> bool:
        """Whether the manifest lists a file."""
        return any(file.path == path for file in self.manifest.files)

    def _json(self, name: str) -> dict[str, Any] | None:
        if not self.has(name):
            return None
        path = self.checked(name)
        with self._described(name):
            value = jsonfile.mapping(jsonfile.load(path, most=MAX_BYTES, nonfinite=True))
        formats.check(value.get("format"), (1,), str(path), StoreError)
        return value

    def _table(
        self, name: str, schema: dict[str, Any], later: Mapping[str, Any] = _NONE
    ) -> pl.DataFrame | None:
        """A table with these columns; ``later`` ones are null where a run has been written before
        there were any."""
        if not self.has(name):
            return None
        path = self.checked(name)
        try:
            kind = name.partition("/")[0].removesuffix(".parquet")
            formats.check_mark(pl.read_parquet_metadata(path), kind, (1,), str(path), StoreError)
            table = pl.read_parquet(path, glob=False)
        except UNREADABLE as error:
            raise StoreError(f"{path} is not a readable table: {error}") from error
        added = [pl.lit(None, kind).alias(key) for key, kind in later.items()
                 if key not in table.columns]  # fmt: skip
        table, schema = table.with_columns(added), {**schema, **later}
        wrong = [key for key, kind in schema.items() if table.schema.get(key) != kind]
        if wrong:
            found = table.schema.get(wrong[0])
            raise StoreError(
                f"{path}: column {wrong[0]!r} is {found}, such a table has {schema[wrong[0]]}"
            )
        return table


def require_outside(store: Path, target: Path) -> None:
    """Make sure that what is written is none of a store's own files.

    Raises:
        StoreError: the target is the store, or lies in it.
    """
    if target.resolve().is_relative_to(store.resolve()):
        raise StoreError(f"{target} lies in the store {store}; choose a place outside of it")


def require(store: Path) -> None:
    """Make sure that a store is there, for whoever only reads or deletes.

    Raises:
        StoreError: it does not exist, is a file, or is a directory of something else.
    """
    if not store.is_dir():
        what = "is a file" if store.exists() else "does not exist"
        raise StoreError(f"{store} {what}; there is no store: give its directory with --store")
    found = {entry.name for entry in store.iterdir()}
    begun = bool(found & _BEGUN) and found <= _BEGUN | _BESIDE
    if not begun and found.isdisjoint(_PARTS):
        raise StoreError(
            f"{store} holds no store: found none of {', '.join(f'{part}/' for part in _PARTS)}; "
            "give a store's directory with --store"
        )


def is_key(text: str) -> bool:
    """Whether this can be a run's key or the beginning of one."""
    return _PREFIX.fullmatch(text) is not None


def keys(store: Path, *, complete: bool = True) -> list[str]:
    """Keys of the runs of a store, in order: those with a manifest, or all that have any file."""
    root = store / "runs"
    found = [p for p in root.iterdir() if _KEY.fullmatch(p.name)] if root.is_dir() else []
    if complete:
        return sorted(p.name for p in found if (p / NAME).is_file())
    return sorted(p.name for p in found if not p.is_dir() or any(p.iterdir()))


def runs(store: Path) -> Iterator[Run]:
    """Every complete run of a store.

    Raises:
        StoreError: a manifest is damaged.
    """
    for key in keys(store):
        yield Run.open(store, key)


def resolve(store: Path, prefix: str, *, complete: bool = True) -> str:
    """The full key of the run whose key begins so.

    Args:
        store: the store's directory.
        prefix: at least four digits.
        complete: only runs with a manifest; False: whatever there is of a run.

    Raises:
        StoreError: none does, or several do.
    """
    have = keys(store, complete=complete)
    if not complete:
        have = sorted({*have, *copies.keys(store)})
    if prefix in have:
        return prefix
    if not _PREFIX.fullmatch(prefix):
        raise StoreError(f"{prefix!r} is no run key: 4 to 64 of the digits 0-9a-f")
    found = [key for key in have if key.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"{prefix} begins {len(found)} run keys in {store}: {_some(found)}")
    missed = [key for key in copies.keys(store) if key.startswith(prefix)]
    if missed:
        raise StoreError(
            f"run {missed[0][:12]} was in {store} and is gone; `rlprobe store verify --repair "
            f"--store {shlex.quote(str(store))}` puts it together again from its objects"
        )
    raise StoreError(f"no run {prefix} in {store}; it has {_some(have) if have else 'none'}")


def _some(found: list[str]) -> str:
    shown = ", ".join(key[:12] for key in found[:_SHOWN])
    more = len(found) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
