"""Records of both sides, process pair by process pair, read ahead where reading is the work.

A record table is read slice by slice as it is compared. A large dump.json takes a second of one
core and more, so several are decoded at once: of two, one in this process and the other beside it;
of more, all in processes of their own, and at most as many as there are jobs are held in memory
besides the pair being compared.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from pathlib import Path

import polars as pl

from rlprobe.compare import early
from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.compare.stage_sources import DumpStage, Process, StageSource
from rlprobe.compare.tables import Held, Table
from rlprobe.dumps import records
from rlprobe.errors import DumpError
from rlprobe.imports import uncollected

Loaded = tuple[Pairing, Table, Table]
_Task = tuple[StageSource | None, Process | None]


def load(plan: StagePlan, jobs: int, beside: Executor | None = None) -> Iterator[Loaded]:
    """Every process pair of a stage with both sides' records (empty where a side lacks it).

    Args:
        plan: what is compared.
        jobs: processes that decode at once, this one among them.
        beside: one that has started already (:func:`early.begun`).

    Raises:
        DumpError, StoreError: a side is damaged.
    """
    sides = plan.benchmark, plan.target
    tasks: list[_Task] = [
        (side, process)
        for pairing in plan.pairings
        for side, process in zip(sides, (pairing.benchmark, pairing.target), strict=True)
    ]
    heavy = [number for number, task in enumerate(tasks) if _file(*task) is not None]
    large = max((_bytes(*tasks[number]) for number in heavy), default=0)
    if jobs < 2 or len(heavy) < 2 or large < early.WORTHWHILE:
        yield from _in_pairs(plan, (_load(*task) for task in tasks))
    elif len(heavy) == 2:
        with early.pool(1) if beside is None else contextlib.nullcontext(beside) as pool:
            yield from _in_pairs(plan, _one_beside(pool, tasks, *heavy))
    else:
        with early.pool(min(jobs, len(heavy))) as pool:
            yield from _in_pairs(plan, _read_ahead(pool, tasks, jobs))


def _in_pairs(plan: StagePlan, tables: Iterator[Table]) -> Iterator[Loaded]:
    for pairing in plan.pairings:
        benchmark, target = next(tables), next(tables)
        yield pairing, benchmark, target


def _one_beside(pool: Executor, tasks: Sequence[_Task], first: int, second: int) -> Iterator[Table]:
    """The only two files that are decoded, one of them in this process."""
    with _told():
        beside = _Beside(pool, *tasks[first])
        try:
            with uncollected():  # as little garbage as there is in modules
                here = _load(*tasks[second])
        except DumpError:
            beside.table()  # where both are damaged, the first is told
            raise
        for number, task in enumerate(tasks):
            if number == first:
                yield beside.table()
            else:
                yield here if number == second else _load(*task)


def _read_ahead(pool: Executor, tasks: Sequence[_Task], jobs: int) -> Iterator[Table]:
    waiting: deque[_Beside | Table] = deque()
    todo = iter(tasks)
    try:
        with _told():
            while True:
                while len(waiting) < max(2, jobs) and (task := next(todo, None)) is not None:
                    # a record table is read when its turn comes, in this process
                    decoded = _file(*task) is not None
                    waiting.append(_Beside(pool, *task) if decoded else _load(*task))
                if not waiting:
                    return
                following = waiting.popleft()
                yield following.table() if isinstance(following, _Beside) else following
    finally:
        for waits in waiting:
            if isinstance(waits, _Beside):
                waits.cancel()


class _Beside:
    """A dump that another process decodes."""

    def __init__(self, pool: Executor, source: StageSource | None, process: Process | None) -> None:
        # Imported where dumps are decoded: most comparisons read tables.
        from rlprobe.dumps import decoding

        path = _file(source, process)
        assert path is not None and process is not None
        self._memory = decoding.Memory()
        self._done = pool.submit(decoding.put, path, process.step, process.rank, self._memory.path)

    def table(self) -> Table:
        """Its records, once they are there."""
        self._done.result()
        return Held(self._memory.table())

    def cancel(self) -> None:
        self._done.cancel()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What became of a process that was killed."""
    try:
        yield
    except BrokenExecutor as error:
        raise DumpError(
            "a process that decoded dump files was killed, probably for memory; --jobs 1 decodes "
            "one file at a time"
        ) from error


def _load(source: StageSource | None, process: Process | None) -> Table:
    if source is None or process is None:
        return Held(pl.DataFrame(schema=records.SCHEMA))
    return source.table(process)


def _file(source: StageSource | None, process: Process | None) -> Path | None:
    """Where a process's dump is to be decoded from; None for a record table, or for nothing."""
    return source.paths[process] if isinstance(source, DumpStage) and process is not None else None


def _bytes(source: StageSource | None, process: Process | None) -> int:
    """Size of a process's dump.json; 0 where there is none."""
    path = _file(source, process)
    if path is None:
        return 0
    file = path if path.is_file() else path / records.DUMP
    return file.stat().st_size if file.is_file() else 0
