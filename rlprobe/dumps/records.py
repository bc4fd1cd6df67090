"""The columnar record table: one Parquet file per stage, a row per tensor or scalar.

Built once when a run is committed, from ``{stage}/step{N}/rank{R}/{dump,debug,stack}.json``, and on
the fly from plain msprobe dumps. Everything that compares reads these columns, never nested JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rlprobe import formats
from rlprobe.dumps.parquet import UNREADABLE
from rlprobe.dumps.schema import SCHEMA as SCHEMA
from rlprobe.errors import DumpError, StoreError

#: Version of a record table.
FORMAT = 1
_STEP = re.compile(r"^step(0|[1-9][0-9]{0,8})$")
_RANK = re.compile(r"^rank(0|[1-9][0-9]{0,8})?$")
_PROC = re.compile(r"^proc([0-9]{1,9})$")
DUMP, DEBUG, STACK, TENSORS = "dump.json", "debug.json", "stack.json", "dump_tensor_data"
_MAX_STACK_BYTES = 1 << 30


@dataclass(frozen=True)
class RankDirectory:
    """One process's dump of one step."""

    step: int
    rank: int
    path: Path


def step_directories(stage_dir: Path) -> list[tuple[int, Path]]:
    """``step{N}`` directories of a stage in numerical order."""
    found = [(int(m[1]), p) for p in _directories(stage_dir) if (m := _STEP.match(p.name))]
    return sorted(found)


def rank_directories(step_dir: Path, step: int) -> list[RankDirectory]:
    """``rank{R}`` directories, or ``proc{pid}`` ones numbered in order of their pid.

    msprobe writes ``proc{pid}`` where there is no process group; the pid means nothing on the
    other side, so a single one is rank 0.

    Raises:
        DumpError: both kinds, or the same rank twice, in one step.
    """
    ranks = [(int(m[1] or 0), p) for p in _directories(step_dir) if (m := _RANK.match(p.name))]
    procs = sorted((int(m[1]), p) for p in _directories(step_dir) if (m := _PROC.match(p.name)))
    if ranks and procs:
        raise DumpError(
            f"{step_dir} holds rank and proc directories: {ranks[0][1].name}, {procs[0][1].name}; "
            "they come from different runs, keep one kind"
        )
    numbered = sorted(ranks) or [(number, p) for number, (_, p) in enumerate(procs)]
    if len({rank for rank, _ in numbered}) < len(numbered):
        raise DumpError(f"{step_dir} holds one rank twice (rank and rank0)")
    return [RankDirectory(step, rank, path) for rank, path in numbered]


def _directories(path: Path) -> Iterable[Path]:
    try:
        return [child for child in path.iterdir() if child.is_dir()]
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error


def dumped(directory: Path) -> list[Path]:
    """A process's dump.json and debug.json, whatever they are.

    A link to nowhere, or a directory of that name, is a dump that cannot be read, not none: whoever
    reads it says so.
    """
    return [p for name in (DUMP, DEBUG) if os.path.lexists(p := directory / name)]


def build(
    stage_dir: Path, stage: str, *, objects: Mapping[str, str] | None = None, stacks: bool = True
) -> pl.DataFrame:
    """The record table of a whole stage directory, columns :data:`SCHEMA`.

    Args:
        stage_dir: ``{stage}/`` with ``step{N}/rank{R}`` (or ``proc{pid}``) below.
        stage: its canonical name, for messages.
        objects: digest of each stored tensor file by its path relative to ``stage_dir``
            (``step0/rank0/dump_tensor_data/x.pt``); fills column ``data``.
        stacks: also read stack.json.

    Raises:
        DumpError: no step or rank directory, or a file that is not in the format.
    """
    ranks = [
        rank for step, path in step_directories(stage_dir) for rank in rank_directories(path, step)
    ]
    if not ranks:
        raise DumpError(
            f"stage {stage}: {stage_dir} holds no step*/rank* (or proc*) directory with a dump; "
            "was anything captured?"
        )
    return pl.concat([build_rank(r, stage_dir, objects=objects, stacks=stacks) for r in ranks])


def build_rank(
    where: RankDirectory,
    stage_dir: Path | None = None,
    *,
    objects: Mapping[str, str] | None = None,
    stacks: bool = True,
) -> pl.DataFrame:
    """The record table of one rank directory: dump.json's records, then debug.json's.

    Raises:
        DumpError: neither file exists, or one is not in the format.
    """
    files = dumped(where.path)
    if not files:
        raise DumpError(f"{where.path} holds neither {DUMP} nor {DEBUG}")
    # Imported where dumps are read: most comparisons read tables, and their whole time counts.
    from rlprobe.dumps import dumpjson

    frame = pl.concat([dumpjson.read(file) for file in files])
    prefix = ""
    if objects is not None and stage_dir is not None:
        prefix = (where.path.relative_to(stage_dir) / TENSORS).as_posix()
    return finish(
        frame,
        where.step,
        where.rank,
        stack=read_stack(where.path / STACK) if stacks else None,
        objects=objects,
        prefix=prefix,
    )


def finish(
    leaves: pl.DataFrame,
    step: int,
    rank: int,
    *,
    stack: Mapping[str, str] | None = None,
    objects: Mapping[str, str] | None = None,
    prefix: str = "",
) -> pl.DataFrame:
    """A record table from the leaves of one rank (:func:`dumpjson.read`)."""
    data = pl.lit(None, pl.String)
    if objects:
        path = pl.lit(f"{prefix}/" if prefix else "") + pl.col("data_name")
        data = path.replace_strict(objects, default=None, return_dtype=pl.String)
    stacks = pl.lit(None, pl.String)
    if stack:
        stacks = pl.col("api").replace_strict(stack, default=None, return_dtype=pl.String)
    return leaves.with_columns(
        step=pl.lit(step, pl.Int32),
        rank=pl.lit(rank, pl.Int32),
        order=pl.int_range(pl.len(), dtype=pl.Int32),
        data=data,
        stack=stacks,
    ).select(list(SCHEMA))


def read_stack(path: Path) -> dict[str, str]:
    """Call stack of each entry from stack.json; empty where there is none.

    Raises:
        DumpError: the file is not ``{id: [[names], [frames]]}``.
    """
    if not path.is_file():
        return {}
    import msgspec

    try:
        if path.stat().st_size > _MAX_STACK_BYTES:
            raise DumpError(f"{path} is larger than {_MAX_STACK_BYTES} bytes")
        table = msgspec.json.decode(
            path.read_bytes(), type=dict[str, tuple[list[str], list[str] | str]]
        )
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not an msprobe stack file: {error}") from error
    stacks: dict[str, str] = {}
    for names, frames in table.values():
        text = frames if isinstance(frames, str) else "\n".join(frame.strip() for frame in frames)
        stacks.update(dict.fromkeys(names, text))
    return stacks


def write(frame: pl.DataFrame, path: Path) -> None:
    """Write a record table as Parquet (lz4: quick to read; one row group per 2**17 rows)."""
    _checked(frame.schema, path)
    frame.write_parquet(
        path, compression="lz4", row_group_size=1 << 17, metadata=formats.mark("records", FORMAT)
    )


def scan(path: Path) -> pl.LazyFrame:
    """A lazy record table; its columns are checked, its rows are not read yet.

    Raises:
        StoreError: the file is missing, damaged, or has other columns.
    """
    try:
        formats.check_mark(
            pl.read_parquet_metadata(path), "records", (FORMAT,), str(path), StoreError
        )
        lazy = pl.scan_parquet(path, glob=False)
        schema = lazy.collect_schema()
    except UNREADABLE as error:
        raise StoreError(f"{path} is not a readable record table: {error}") from error
    _checked(schema, path)
    return lazy


def read(path: Path, columns: list[str] | None = None) -> pl.DataFrame:
    """A record table, or some of its columns.

    Raises:
        StoreError: as :func:`scan`.
    """
    lazy = scan(path)
    try:
        return lazy.select(columns or list(SCHEMA)).collect()
    except UNREADABLE as error:
        raise StoreError(f"{path} is not a readable record table: {error}") from error


def _checked(schema: Mapping[str, Any], path: Path) -> None:
    wrong = [key for key, kind in SCHEMA.items() if schema.get(key) != kind]
    if wrong:
        raise StoreError(
            f"{path}: column {wrong[0]!r} is {schema.get(wrong[0])}, a record table has "
            f"{SCHEMA[wrong[0]]}; it was written by another version, build it again from the dump"
        )
