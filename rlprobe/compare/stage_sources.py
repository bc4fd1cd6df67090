"""Where a stage's records come from: dump files, a stored run's tables, or rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from rlprobe.compare import misnamed, undumped
from rlprobe.compare.tables import Held, Stored, Table
from rlprobe.dumps import framework, records
from rlprobe.said import Said, listed, say
from rlprobe.store import listing

if TYPE_CHECKING:
    from rlprobe.dumps.rollouts.folder import Folder
    from rlprobe.dumps.rollouts.table import Read
    from rlprobe.dumps.tensors.source import TensorSource

#: Directory of a run's record tables.
RECORDS = "records"
#: Directories named in a note.
_NAMED = 6


@dataclass(frozen=True, order=True)
class Process:
    """One process's records of one step."""

    step: int
    rank: int


@dataclass(frozen=True)
class StageSource:
    """The records of one stage on one side, process by process."""

    processes: Sequence[Process]

    @property
    def unranked(self) -> frozenset[Process]:
        """Processes whose rank nothing says; the number they have here is of their order."""
        return frozenset()

    @property
    def notes(self) -> tuple[Said, ...]:
        """What the user should know of it."""
        return ()

    @property
    def framework(self) -> str | None:
        """The framework that it was dumped in; None where nothing says."""
        return None

    def label(self, process: Process) -> str:
        """What the user knows this process by."""
        return f"rank {process.rank}"

    def table(self, process: Process) -> Table:
        """One process's records; a dump is decoded here and now, a record table when it is read.

        Raises:
            DumpError: a dump file is damaged.
        """
        raise NotImplementedError

    def tensors(self, process: Process, check_crc: bool) -> TensorSource | None:
        """This process's tensor files, None when it has none."""
        raise NotImplementedError

    def stacks(self, process: Process) -> dict[str, str]:
        """Call stacks by the name of the call; empty where none were recorded.

        Raises:
            DumpError, StoreError: the file is damaged.
        """
        raise NotImplementedError

    def construct(self, process: Process) -> dict[str, str | None]:
        """The call around each call (:mod:`rlprobe.dumps.construct`); empty where none is told.

        Raises:
            DumpError, StoreError: the file is damaged.
        """
        return {}


@dataclass(frozen=True)
class DumpStage(StageSource):
    """A stage read from dump.json files on the fly."""

    #: Directory, or single file, of each process.
    paths: dict[Process, Path] = field(default_factory=dict)
    without_rank: frozenset[Process] = frozenset()
    #: The step's or stage's directory that was looked through; None of a single process.
    root: Path | None = None

    @property
    def unranked(self) -> frozenset[Process]:
        return self.without_rank

    @property
    def notes(self) -> tuple[Said, ...]:
        if self.root is None:
            return ()
        notes = []
        if found := misnamed.below(self.root):
            notes.append(
                say(
                    "not read, as msprobe calls such directories otherwise: {names}, in {place}",
                    names=", ".join(f"{name} ({meant})" for name, meant in found[:_NAMED]),
                    place=self.root.name,
                )
            )
        if lost := undumped.below(self.root):
            notes.append(
                say(
                    "without dump.json, and so without records: {names}, in {place}; a run that "
                    "ended early or a copy that is not whole leaves such directories",
                    names=listed(lost, _NAMED),
                    place=str(self.root),
                )
            )
        return tuple(notes)

    @property
    def framework(self) -> str | None:
        for path in self.paths.values():
            files = [path] if path.is_file() else [path / records.DUMP, path / records.DEBUG]
            for found in map(framework.of, files):
                if found is not None:
                    return found
        return None

    def label(self, process: Process) -> str:
        path = self.paths[process]
        directory = path.parent if path.is_file() else path
        above = [p.name for p in directory.parents[:2] if p.name.isdecimal()]
        return "/".join([*above, directory.name])

    def table(self, process: Process) -> Table:
        # Imported where dumps are read: most comparisons read tables, and their whole time counts.
        from rlprobe.dumps import decoding

        return Held(decoding.table(self.paths[process], process.step, process.rank))

    def tensors(self, process: Process, check_crc: bool) -> TensorSource | None:
        from rlprobe.dumps.tensors import source

        path = self.paths[process]
        # Always beside dump.json: the absolute dump_data_dir inside the file is of another place.
        directory = (path.parent if path.is_file() else path) / records.TENSORS
        return source.in_directory(directory, check_crc) if directory.is_dir() else None

    def stacks(self, process: Process) -> dict[str, str]:
        path = self.paths[process]
        return records.read_stack((path.parent if path.is_file() else path) / records.STACK)

    def construct(self, process: Process) -> dict[str, str | None]:
        from rlprobe.dumps import construct

        path = self.paths[process]
        return construct.read((path.parent if path.is_file() else path) / construct.NAME)


@dataclass(frozen=True)
class RunStage(StageSource):
    """A stage of a stored run: its Parquet record table, and its tree for tensors."""

    path: Path = Path()
    #: First row and number of rows of each process.
    rows: dict[Process, tuple[int, int]] = field(default_factory=dict)
    tree: Path | None = None

    def table(self, process: Process) -> Table:
        listing.found(self.path.parents[1], f"{RECORDS}/{self.path.name}")
        return Stored(self.path, records.scan(self.path), *self.rows[process])

    def tensors(self, process: Process, check_crc: bool) -> TensorSource | None:
        if self.tree is None:
            return None
        from rlprobe.dumps.tensors import source
        from rlprobe.dumps.tensors.spans import spans

        run = self.path.parents[1]
        listing.found(run, "tensors.parquet")
        found = spans(run, f"{self.tree.name}/step{process.step}/rank{process.rank}")
        return source.in_store(found, check_crc) if found else None

    def stacks(self, process: Process) -> dict[str, str]:
        rows = self.table(process).rows(["name", "stack"]).drop_nulls("stack")
        call = pl.col("name").str.extract(r"^(.*\.(?:forward|backward)(?:\.\d+)?)(?:\.|$)")
        first = rows.with_columns(call=pl.coalesce(call, "name")).unique("call", keep="first")
        return dict(first.select("call", "stack").iter_rows())

    def construct(self, process: Process) -> dict[str, str | None]:
        if self.tree is None:
            return {}
        from rlprobe.dumps import construct

        run = self.path.parents[1]
        place = f"{self.tree.relative_to(run).as_posix()}/step{process.step}/rank{process.rank}"
        file = listing.found(run, f"{place}/{construct.NAME}")
        return {} if file is None else construct.read(file)


@dataclass(frozen=True)
class RolloutStage(StageSource):
    """What was generated: rollouts as a framework keeps them, a sample's fields as records."""

    folder: Folder
    #: The step that was read last: its records and its tensors are asked for one by one.
    last: dict[Process, Read] = field(default_factory=dict, repr=False, compare=False)

    @property
    def notes(self) -> tuple[Said, ...]:
        from rlprobe.dumps.rollouts.sample import OF_THE_RUN

        names = ", ".join(sorted(OF_THE_RUN))
        left_out = say("what names a request of one run is not compared: {names}", names=names)
        return (*self.folder.notes, left_out)

    def read(self, process: Process) -> Read:
        """The records of a step, and what its samples are known by.

        Raises:
            DumpError: a file is damaged.
        """
        from rlprobe.dumps.rollouts import table

        if process not in self.last:
            self.last.clear()
            self.last[process] = table.read(self.folder.read(process.step), process.step)
        return self.last[process]

    def label(self, process: Process) -> str:
        return f"step {process.step}"

    def table(self, process: Process) -> Table:
        return Held(self.read(process).frame)

    def tensors(self, process: Process, check_crc: bool) -> TensorSource | None:
        return self.read(process).tensors

    def stacks(self, process: Process) -> dict[str, str]:
        return {}
