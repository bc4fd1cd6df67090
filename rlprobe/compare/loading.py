"""Records of both sides, process pair by process pair, read ahead where reading is the work.

A record table is read slice by slice as it is compared. A large dump.json takes seconds of one
core, so several are decoded at once in processes of their own; at most as many as there are jobs
are held in memory besides the pair being compared.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import polars as pl

from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.compare.sides import DumpStage, Process, StageSource
from rlprobe.compare.tables import Held, Table
from rlprobe.dumps import records
from rlprobe.errors import DumpError

#: Bytes of dump.json from which decoding in another process pays for starting it.
WORTHWHILE = 16 << 20

Loaded = tuple[Pairing, Table, Table]


def load(plan: StagePlan, jobs: int) -> Iterator[Loaded]:
    """Every process pair of a stage with both sides' records (empty where a side lacks it).

    Raises:
        DumpError, StoreError: a side is damaged.
    """
    sides = plan.benchmark, plan.target
    tasks = [
        (side, process)
        for pairing in plan.pairings
        for side, process in zip(sides, (pairing.benchmark, pairing.target), strict=True)
    ]
    heavy = [isinstance(side, DumpStage) and process is not None for side, process in tasks]
    large = max(
        (_bytes(*task) for task, is_dump in zip(tasks, heavy, strict=True) if is_dump), default=0
    )
    if jobs < 2 or sum(heavy) < 2 or large < WORTHWHILE:
        yield from _in_pairs(plan, (_load(*task) for task in tasks))
        return
    context = multiprocessing.get_context("spawn")
    # what these processes make is kept until they end: looking for garbage in it takes a tenth
    with ProcessPoolExecutor(
        min(jobs, sum(heavy)), mp_context=context, initializer=gc.disable
    ) as pool:
        yield from _in_pairs(plan, _read_ahead(pool, tasks, jobs))


def _in_pairs(plan: StagePlan, tables: Iterator[Table]) -> Iterator[Loaded]:
    for pairing in plan.pairings:
        benchmark, target = next(tables), next(tables)
        yield pairing, benchmark, target


def _read_ahead(
    pool: ProcessPoolExecutor,
    tasks: Sequence[tuple[StageSource | None, Process | None]],
    jobs: int,
) -> Iterator[Table]:
    waiting: deque[Future[bytes] | Table] = deque()
    todo = iter(tasks)
    try:
        while True:
            while len(waiting) < max(2, jobs) and (task := next(todo, None)) is not None:
                side, process = task
                # a record table is read when its turn comes, in this process
                if isinstance(side, DumpStage) and process is not None:
                    waiting.append(pool.submit(_packed, side, process))
                else:
                    waiting.append(_load(side, process))
            if not waiting:
                return
            following = waiting.popleft()
            yield _unpacked(following.result()) if isinstance(following, Future) else following
    except BrokenProcessPool as error:
        raise DumpError(
            "a process that decoded dump files was killed, probably for memory; --jobs 1 decodes "
            "one file at a time"
        ) from error
    finally:
        for future in waiting:
            if isinstance(future, Future):
                future.cancel()


def _load(source: StageSource | None, process: Process | None) -> Table:
    if source is None or process is None:
        return Held(pl.DataFrame(schema=records.SCHEMA))
    return source.table(process)


def _packed(source: StageSource, process: Process) -> bytes:
    """A process's records as Arrow IPC with lz4: a third of the time of pickling the frame."""
    buffer = io.BytesIO()
    source.table(process).rows(list(records.SCHEMA)).write_ipc(buffer, compression="lz4")
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Table:
    return Held(pl.read_ipc(packed))


def _bytes(source: StageSource | None, process: Process | None) -> int:
    """Size of a process's dump.json; 0 where there is none."""
    if not isinstance(source, DumpStage) or process is None:
        return 0
    path = source.paths[process]
    file = path if path.is_file() else path / records.DUMP
    return file.stat().st_size if file.is_file() else 0
