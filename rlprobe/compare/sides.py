"""What is compared: a run in the store, or any part of a dump tree as msprobe left it.

Accepted: ``{store}/runs/{key}`` (or the key alone, with a store), a dump tree, a stage, step, rank
or proc directory, a ``dump.json`` or ``debug.json``. A level of directories named by process
numbers, as inference engines write it (``{dump}/{pid}/step{N}/rank{R}``), is looked through. All
become stages that hold processes, each loaded when its turn comes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rlprobe import stages
from rlprobe.compare import misnamed
from rlprobe.compare.stage_sources import (
    RECORDS,
    DumpStage,
    Process,
    RolloutStage,
    RunStage,
    StageSource,
)
from rlprobe.dumps import places, records
from rlprobe.errors import ConfigError, DumpError, RlprobeError, StoreError, UsageError
from rlprobe.store import listing

MANIFEST, DUMP = "manifest.json", "dump"
#: Where a run or a dump tree keeps key data.
KEY_DATA = ("data", "dump/data")
#: Name of a single stage directory that does not say which stage it holds.
UNNAMED = "unnamed"
_RANK_DIR = re.compile(r"^(?:rank|proc)(\d*)$")
_STEP_DIR = re.compile(r"^step(\d+)$")


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    #: What the user called it.
    name: str
    path: Path
    #: By stage: canonical names where known, directory names otherwise, :data:`UNNAMED` for a
    #: single directory or file that does not say.
    stages: dict[str, StageSource]
    #: Whether the user pointed at one stage of a tree, or at a part of one: what it is called does
    #: not matter then.
    direct: bool = False

    @property
    def single(self) -> bool:
        return len(self.stages) == 1


def resolve(name: str, store: Path | None = None) -> Side:
    """Find out what ``name`` is.

    Raises:
        UsageError: there is nothing of that name.
        DumpError: it exists but holds no dump; the message says what was looked for.
    """
    if not name.strip():
        raise UsageError("an empty path names nothing; give a dump, or a part of one")
    path = Path(name)
    if not path.exists():
        path = _run_of_key(store, name)
    if path.is_file() and path.suffix != ".json":
        return Side(name, path, _rollouts(path, path.name))
    if path.is_file():
        return Side(name, path, {_stage_above(path): _from_file(path)}, direct=True)
    if (path / MANIFEST).is_file() or (path / RECORDS).is_dir():
        return Side(name, path, _from_run(path))
    part = _from_part(path)
    if part:
        return Side(name, path, part, direct=True)
    found = _from_tree(path)
    if not found and (path / DUMP).is_dir():
        found = _from_part(path / DUMP) or _from_tree(path / DUMP)
    if not found and any((path / place).is_dir() for place in KEY_DATA):
        return Side(name, path, {})
    return Side(name, path, found or _rollouts(path, "dump"))


def both(benchmark: str, target: str, store: Path | None = None) -> tuple[Side, Side]:
    """What two names are; of two that are nothing, both are named.

    Raises:
        UsageError, DumpError: as :func:`resolve`.
    """
    try:
        first = resolve(benchmark, store)
    except RlprobeError as error:
        try:
            resolve(target, store)
        except RlprobeError as other:
            if str(other) != str(error):
                raise type(error)(f"{error}; {other}") from error
        raise
    return first, resolve(target, store)


def _rollouts(path: Path, sought: str) -> dict[str, StageSource]:
    """Rollouts as frameworks keep them, where a path holds them and nothing else.

    Raises:
        DumpError: it holds none either; the message says what was looked for.
    """
    # Imported here: most comparisons are of dumps.
    from rlprobe.dumps.rollouts import folder

    found = folder.find(path)
    if found is not None:
        return {stages.GENERATE: RolloutStage([Process(s, 0) for s in found.steps], found)}
    if path.is_file():
        raise DumpError(
            f"{path} is neither {records.DUMP} nor {records.DEBUG}, nor a file of rollouts "
            "(verl's {step}.jsonl, gen_batch.dp or tq_batch.pt, slime's debug data)"
        )
    raise DumpError(
        f"{path} holds no {sought}: looked for a run ({MANIFEST}), dump.json or debug.json, "
        "rank{R}/ or proc{pid}/, step{N}/, stage directories holding step{N}/, directories of "
        "process numbers holding any of these, and rollouts (verl's {step}.jsonl, gen_batch.dp "
        f"and tq_batch.pt, slime's debug data){_spelled_otherwise(path)}"
    )


def _spelled_otherwise(path: Path) -> str:
    found = misnamed.below(path)
    if not found:
        return ""
    name, meant = found[0]
    return f". It has a {name}, which msprobe would call {meant}: rename such directories"


def _run_of_key(store: Path | None, name: str) -> Path:
    """The run whose key begins so; what is no key is told to be no path either."""
    nothing = f"{name}: no such file or directory"
    if store is None:
        raise UsageError(f"{nothing} (a run's key needs --store)")
    # Imported here: most sides are paths, and the models of a manifest load slowly.
    from rlprobe.store import read

    if not read.is_key(name):
        raise UsageError(f"{nothing}, and no run's key: 4 or more of the digits 0-9a-f")
    try:
        read.require(store)
        return store / "runs" / read.resolve(store, name)
    except StoreError as error:
        raise UsageError(f"{nothing}, and as a run's key: {error}") from error


def _from_run(path: Path) -> dict[str, StageSource]:
    listing.require_manifest(path)
    tables = sorted((path / RECORDS).glob("*.parquet"))
    if (path / MANIFEST).is_file():
        # a stage whose table is gone must not look like one that was not captured
        wanted = {name for name in listing.listed(path) if name.startswith(f"{RECORDS}/")}
        for name in wanted - {f"{RECORDS}/{table.name}" for table in tables}:
            listing.checked(path, name)
    if not tables:
        raise DumpError(f"run {path} holds no {RECORDS}/*.parquet: nothing was captured in it")
    found: dict[str, StageSource] = {}
    for table in tables:
        found[table.stem] = stage_of_run(path, table)
    return _in_order(found)


def stage_of_run(path: Path, table: Path) -> RunStage:
    """One stage of a run.

    Args:
        path: the run.
        table: its records of the stage.

    Raises:
        StoreError: the table is damaged.
    """
    try:
        rows = _rows(table)
    except StoreError:
        # of a table that is not what was committed it is known how to mend it
        listing.found(path, f"{RECORDS}/{table.name}")
        raise
    return RunStage(sorted(rows), table, rows, places.of_stage(path / DUMP, table.stem))


def _rows(table: Path) -> dict[Process, tuple[int, int]]:
    """First row and number of rows of each process in a record table.

    Raises:
        StoreError: the table is damaged, or a process's rows do not stand together.
    """
    keys = records.read(table, ["step", "rank"])
    runs = keys.select(pl.struct("step", "rank").rle().alias("run")).unnest("run")
    found: dict[Process, tuple[int, int]] = {}
    first = 0
    for length, key in runs.iter_rows():
        process = Process(key["step"], key["rank"])
        if process in found:
            raise StoreError(
                f"{table}: the rows of step {process.step}, rank {process.rank} do not stand "
                "together; build the table again from the dump"
            )
        found[process] = first, length
        first += length
    return found


def _from_file(path: Path) -> StageSource:
    if path.name not in (records.DUMP, records.DEBUG):
        raise DumpError(f"{path} is neither {records.DUMP} nor {records.DEBUG}")
    process = Process(_number(_STEP_DIR, path.parent.parent.name), _rank(path.parent.name))
    return DumpStage([process], {process: path})


def _from_part(path: Path) -> dict[str, StageSource]:
    """The stage in a rank, proc, step or stage directory; empty for any other directory."""
    if records.dumped(path):
        process = Process(_number(_STEP_DIR, path.parent.name), _rank(path.name))
        return {_stage_above(path / "."): DumpStage([process], {process: path})}
    ranks = records.rank_directories(path, _number(_STEP_DIR, path.name))
    if ranks:
        # the vendor's guide draws rank directories in the stage's own, without a step
        own = _known(path.resolve().name)
        stage = _known(path.resolve().parent.name) if own == UNNAMED else own
        return {stage: _dump_stage(ranks, path)}
    steps = records.step_directories(path)
    if steps or (_by_process(path) and not _stage_directories(path)):
        ranks = _ranks_of_stage(path)
        # steps in which no process dumped anything are a stage all the same, of no record
        return {_known(path.resolve().name): _dump_stage(ranks, path)} if ranks or steps else {}
    return {}


def _from_tree(path: Path) -> dict[str, StageSource]:
    """The stages in a directory of stage directories, below process numbers or not."""
    found: dict[str, list[records.RankDirectory]] = {}
    roots: dict[str, Path] = {}
    names: dict[str, str] = {}
    above = [path, *(child for child in _numbered(path) if _stage_directories(child))]
    for child in (child for place in above for child in _stage_directories(place)):
        ranks = _ranks_of_stage(child)
        name = stages.ALIASES.get(child.name, child.name)
        if ranks and names.setdefault(name, child.name) != child.name:
            raise DumpError(
                f"{path} holds stage {name} under two names ({child.name} is one of them); "
                "compare the stage directories one by one"
            )
        if ranks:
            found.setdefault(name, []).extend(ranks)
            roots.setdefault(name, child)
    others = [rank for child in _by_process(path) for rank in _ranks_below(child)]
    if others:
        found.setdefault(UNNAMED, []).extend(others)
    return _in_order({name: _dump_stage(ranks, roots.get(name)) for name, ranks in found.items()})


def _numbered(path: Path) -> list[Path]:
    """Directories named by a number, as engines name them by their process, in its order."""
    found = (p for p in path.iterdir() if p.name.isdecimal() and len(p.name) <= 10 and p.is_dir())
    return sorted(found, key=lambda p: (int(p.name), p.name))


def _by_process(path: Path) -> list[Path]:
    """Directories of process numbers that hold steps."""
    return [child for child in _numbered(path) if records.step_directories(child)]


def _stage_directories(path: Path) -> list[Path]:
    """Directories that hold steps, or process numbers and then steps."""
    return [
        child
        for child in sorted(p for p in path.iterdir() if p.is_dir() and not p.name.isdecimal())
        if records.step_directories(child) or _by_process(child) or _without_step(child)
    ]


def _without_step(path: Path) -> list[records.RankDirectory]:
    """Ranks right in a directory of a stage's name, as the vendor's guide draws them: step 0."""
    if _known(path.name) == UNNAMED:
        return []
    return [rank for rank in records.rank_directories(path, 0) if records.dumped(rank.path)]


def _ranks_of_stage(stage_dir: Path) -> list[records.RankDirectory]:
    """Processes of a stage, whose directories may stand below process numbers."""
    if records.step_directories(stage_dir):
        return _ranks_below(stage_dir)
    below = [rank for child in _by_process(stage_dir) for rank in _ranks_below(child)]
    return below or _without_step(stage_dir)


def _ranks_below(stage_dir: Path) -> list[records.RankDirectory]:
    steps = records.step_directories(stage_dir)
    ranks = [r for step, path in steps for r in records.rank_directories(path, step)]
    return [rank for rank in ranks if records.dumped(rank.path)]


def _dump_stage(ranks: Sequence[records.RankDirectory], root: Path | None) -> DumpStage:
    """A stage of these processes; where two claim one rank of a step, ranks name none of them."""
    paths = {Process(rank.step, rank.rank): rank.path for rank in ranks}
    if len(paths) == len(ranks):
        nameless = frozenset(p for p, path in paths.items() if path.name.startswith("proc"))
        return DumpStage(sorted(paths), paths, nameless, root)
    met: Counter[int] = Counter()
    paths = {}
    for rank in ranks:
        paths[Process(rank.step, met[rank.step])] = rank.path
        met[rank.step] += 1
    return DumpStage(sorted(paths), paths, frozenset(paths), root)


def _in_order(found: dict[str, StageSource]) -> dict[str, StageSource]:
    known = {name: number for number, name in enumerate(stages.STAGES)}
    return dict(sorted(found.items(), key=lambda item: (known.get(item[0], len(known)), item[0])))


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.match(name)
    return int(match[1]) if match and match[1] else 0


def _rank(name: str) -> int:
    """The rank of a directory compared alone; a pid means nothing, so ``proc{pid}`` is rank 0."""
    return 0 if name.startswith("proc") else _number(_RANK_DIR, name)


def _stage_above(path: Path) -> str:
    """The stage of a file in ``{stage}/step{N}/rank{R}/``."""
    parents = path.resolve().parents if path.name else [path.resolve(), *path.resolve().parents]
    names = [parent.name for parent in parents]
    for number, name in enumerate(names[:3]):
        if _STEP_DIR.match(name) and number + 1 < len(names):
            return _known(names[number + 1])
    return UNNAMED


def _known(directory: str) -> str:
    """The stage a directory's name says, :data:`UNNAMED` for any other name."""
    try:
        return stages.canonical(directory)
    except ConfigError:
        return UNNAMED
