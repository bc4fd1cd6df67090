"""Key data of both sides: of runs in the store, and of dumps that were compared by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rlprobe.compare import planner
from rlprobe.compare.samples.run import open_side
from rlprobe.dumps import results as tables
from rlprobe.dumps.key_data import KeyData, Row
from rlprobe.errors import DumpError
from rlprobe.judge import reasons
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET


@dataclass(frozen=True)
class Source:
    """One side's key data, and which of its steps is the one that is judged."""

    data: KeyData
    step: int

    def rows(self, name: str) -> list[Row]:
        """All rows of a name.

        Raises:
            DumpError: a file is damaged.
        """
        return self.data.rows(name, self.step)


def both(results: Results, step: int) -> tuple[Source | None, Source | None]:
    """The benchmark's and the target's key data; None where a side has none.

    Args:
        results: a comparison, of runs or of dumps.
        step: captured step of the benchmark.

    Raises:
        DumpError, StoreError: a side is damaged.
    """
    if not results.of_dumps:
        return _of_run(results, BENCHMARK, step), _of_run(results, TARGET, step)
    said = tables.sides(results.directory)
    if said is None:
        return None, None
    benchmark, target = (open_side(Path(path)) for path in (said.benchmark, said.target))
    other = step
    if benchmark is not None and target is not None:
        pairs = planner.pair_steps(benchmark.steps(), target.steps(), said.map_steps, [])
        other = next((t for b, t in pairs if b == step and t is not None), step)
    return (
        None if benchmark is None else Source(benchmark, step),
        None if target is None else Source(target, other),
    )


def _of_run(results: Results, role: str, step: int) -> Source | None:
    run = results.run(role)
    data = None if run is None else run.recorded
    return None if data is None else Source(data, step)


def absent(results: Results, step: int) -> dict[str, str]:
    """Key data of dumps that cannot be held against the other side, and why (reasons.UNJUDGED).

    Raises:
        DumpError, StoreError: a side is damaged.
    """
    sides = both(results, step)
    found: dict[str, str] = {}
    for stage in results.stages():
        summary = results.summary(TARGET, stage)
        if summary is not None and None in sides:  # what was compared is no longer where it was
            found |= dict.fromkeys(sorted(summary.joined), reasons.UNREADABLE)
    names = [set[str]() if side is None else set(side.data.keys()) for side in sides]
    for name in names[0] ^ names[1]:
        found.setdefault(name, reasons.NO_PARTNER)
    for side in sides:
        for name in sorted(names[0] & names[1]):
            try:
                if side is not None:
                    side.rows(name)
            except DumpError:
                found[name] = reasons.UNREADABLE
    return found


def samples(results: Results, step: int) -> tuple[Counter[str], Counter[str]]:
    """How often each side's prompts and responses hold each sample (its digest); empty if unknown.

    Raises:
        DumpError, StoreError: a side is damaged.
    """
    found: list[Counter[str]] = []
    for side in both(results, step):
        batches = {} if side is None else side.data.micro_batches(side.step)
        found.append(Counter(sample for batch in batches.values() for sample in batch.samples))
    return found[0], found[1]
