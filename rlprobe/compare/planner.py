"""Which stage, step and rank of one side is compared with which of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlprobe import stages
from rlprobe.compare.sides import UNNAMED, Process, Side, StageSource
from rlprobe.errors import NotComparableError, UsageError


@dataclass(frozen=True)
class Pairing:
    """One process of either side, or of both. ``step`` and ``rank`` name it in the result."""

    step: int
    rank: int
    benchmark: Process | None
    target: Process | None


@dataclass(frozen=True)
class StagePlan:
    """One stage's comparison."""

    stage: str
    benchmark: StageSource | None
    target: StageSource | None
    pairings: tuple[Pairing, ...]
    notes: tuple[str, ...] = field(default=())


def plan(benchmark: Side, target: Side, wanted: Sequence[str] | None = None) -> list[StagePlan]:
    """Pair stages, steps and ranks; what one side lacks is planned as that side only.

    Two stage directories (or parts of them) are compared whatever the stages are called: the user
    pointed at both. The same holds for a single step and a single rank.

    Args:
        wanted: stages to compare; with single stage directories, the stage's name.

    Raises:
        UsageError: several stages are wanted of two single ones, or one that does not exist.
        NotComparableError: a wanted stage is on neither side, or the sides have no stage in common.
    """
    names = [stages.ALIASES.get(name, name) for name in wanted or ()]
    if _pointed_at(benchmark, target, names):
        return [_single(benchmark, target, names)]
    missing = [n for n in names if n not in benchmark.stages and n not in target.stages]
    if missing:
        # a stage that exists was not captured; any other name is a mistake
        error = NotComparableError if missing[0] in stages.STAGES else UsageError
        raise error(
            f"stage {missing[0]!r} is on neither side; benchmark has "
            f"{', '.join(benchmark.stages)}; target has {', '.join(target.stages)}"
        )
    if not names and not set(benchmark.stages) & set(target.stages):
        raise NotComparableError(
            f"no stage in common: {benchmark.name} has {', '.join(benchmark.stages)}; "
            f"{target.name} has {', '.join(target.stages)}"
        )
    every = dict.fromkeys([*benchmark.stages, *target.stages])
    order = {name: number for number, name in enumerate(stages.STAGES)}
    chosen = sorted(
        (name for name in every if not names or name in names),
        key=lambda name: order.get(name, len(order)),
    )
    return [
        _stage_plan(name, benchmark.stages.get(name), target.stages.get(name)) for name in chosen
    ]


def _pointed_at(benchmark: Side, target: Side, names: Sequence[str]) -> bool:
    """Whether both sides are one stage that is compared whatever it is called.

    A run or a tree that happens to hold one stage was not chosen for it: there the name counts,
    and a directory that does not say its stage takes it over.
    """
    if not (benchmark.single and target.single):
        return False
    if benchmark.direct and target.direct:
        return True
    said = {name for side in (benchmark, target) for name in side.stages} - {UNNAMED}
    return len(said) == 1 and said.issuperset(names)


def _single(benchmark: Side, target: Side, names: Sequence[str]) -> StagePlan:
    (first, source_b), (second, source_t) = (*benchmark.stages.items(), *target.stages.items())
    if len(names) > 1:
        raise UsageError("both sides are a single stage: give one --stage, its name")
    notes: list[str] = []
    if first != second and UNNAMED not in (first, second):
        notes.append(f"stage {first} of the benchmark is compared with {second} of the target")
    name = names[0] if names else (first if first != UNNAMED else second)
    return _stage_plan(name, source_b, source_t, notes)


def _stage_plan(
    stage: str,
    benchmark: StageSource | None,
    target: StageSource | None,
    notes: Sequence[str] = (),
) -> StagePlan:
    if benchmark is None or target is None:
        only = benchmark or target
        assert only is not None
        side = "benchmark" if target is None else "target"
        return StagePlan(
            stage,
            benchmark,
            target,
            tuple(
                Pairing(
                    p.step,
                    p.rank,
                    p if benchmark is not None else None,
                    p if target is not None else None,
                )
                for p in only.processes
            ),
            (*notes, f"stage {stage} is on the {side} only"),
        )
    pairings, more = _pair_processes(benchmark.processes, target.processes)
    return StagePlan(stage, benchmark, target, tuple(pairings), (*notes, *more))


def _pair_processes(
    benchmark: Sequence[Process], target: Sequence[Process]
) -> tuple[list[Pairing], list[str]]:
    notes: list[str] = []
    steps = _pair([p.step for p in benchmark], [p.step for p in target], "step", notes)
    pairings: list[Pairing] = []
    uneven: list[str] = []
    for step_b, step_t in steps:
        ranks_b = {p.rank: p for p in benchmark if p.step == step_b}
        ranks_t = {p.rank: p for p in target if p.step == step_t}
        step = step_b if step_b is not None else step_t
        assert step is not None
        said: list[str] = []
        for rank_b, rank_t in _pair(list(ranks_b), list(ranks_t), "rank", said):
            rank = rank_b if rank_b is not None else rank_t
            assert rank is not None
            pairings.append(
                Pairing(
                    step,
                    rank,
                    ranks_b.get(rank_b) if rank_b is not None else None,
                    ranks_t.get(rank_t) if rank_t is not None else None,
                )
            )
        uneven.extend(said)
        if step_b is not None and step_t is not None and len(ranks_b) != len(ranks_t):
            uneven.append(
                f"benchmark has {len(ranks_b)} ranks, target {len(ranks_t)}: ranks of the same "
                "number are compared; their samples and shards need not be the same, so "
                "activations may differ in shape, and the other ranks' records are one-sided"
            )
    return pairings, [*notes, *dict.fromkeys(uneven)]


def _pair(
    benchmark: Sequence[int], target: Sequence[int], what: str, notes: list[str]
) -> list[tuple[int | None, int | None]]:
    """Equal numbers together; a single one on either side together whatever its number."""
    left, right = sorted(set(benchmark)), sorted(set(target))
    if len(left) == len(right) == 1 and left != right:
        notes.append(f"{what} {left[0]} of the benchmark is compared with {what} {right[0]}")
        return [(left[0], right[0])]
    return [(n if n in left else None, n if n in right else None) for n in sorted({*left, *right})]
