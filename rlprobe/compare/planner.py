"""Which stage, step and rank of one side is compared with which of the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlprobe import stages
from rlprobe.compare.sides import UNNAMED, Side
from rlprobe.compare.stage_sources import Process, RolloutStage, StageSource
from rlprobe.errors import NotComparableError, UsageError
from rlprobe.said import COMMA, Said, exactly, joined, of_side, say


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
    notes: tuple[Said, ...] = field(default=())


def plan(
    benchmark: Side,
    target: Side,
    wanted: Sequence[str] | None = None,
    map_steps: Mapping[int, int] | None = None,
) -> list[StagePlan]:
    """Pair stages, steps and ranks; what one side lacks is planned as that side only.

    Two stage directories (or parts of them) are compared whatever the stages are called: the user
    pointed at both. The same holds for a single step and a single rank.

    Args:
        wanted: stages to compare; with single stage directories, the stage's name.
        map_steps: the target's step for steps of the benchmark. One alone moves all others by the
            same distance (a resumed run); of several, the others keep their numbers.

    Raises:
        DumpError: processes without ranks are paired by what they hold, and that is damaged.
        UsageError: several stages are wanted of two single ones, or one that does not exist; or a
            step is mapped twice.
        NotComparableError: a wanted stage is on neither side, the sides have no stage in common, or
            one holds rollouts and the other does not.
    """
    _require_alike(benchmark, target)
    require_once((map_steps or {}).items())
    names = [stages.ALIASES.get(name, name) for name in wanted or ()]
    steps = map_steps or {}
    if _pointed_at(benchmark, target, names):
        return [_single(benchmark, target, names, steps)]
    missing = [n for n in names if n not in benchmark.stages and n not in target.stages]
    if missing:
        # a stage that exists was not captured; any other name is a mistake
        error = NotComparableError if missing[0] in stages.STAGES else UsageError
        raise error(
            f"stage {missing[0]!r} is on neither side; benchmark has "
            f"{', '.join(benchmark.stages) or 'none'}; "
            f"target has {', '.join(target.stages) or 'none'}"
        )
    if not names and not set(benchmark.stages) & set(target.stages):
        raise NotComparableError(
            f"no stage in common: {benchmark.name} has {', '.join(benchmark.stages) or 'none'}; "
            f"{target.name} has {', '.join(target.stages) or 'none'}"
        )
    every = dict.fromkeys([*benchmark.stages, *target.stages])
    order = {name: number for number, name in enumerate(stages.STAGES)}
    chosen = sorted(
        (name for name in every if not names or name in names),
        key=lambda name: order.get(name, len(order)),
    )
    return [
        _stage_plan(name, benchmark.stages.get(name), target.stages.get(name), steps)
        for name in chosen
    ]


def _require_alike(benchmark: Side, target: Side) -> None:
    """Rollouts are compared with rollouts of their kind: others have other fields."""
    kinds = [
        next((s.folder.kind.name for s in side.stages.values() if isinstance(s, RolloutStage)), "")
        for side in (benchmark, target)
    ]
    if kinds[0] != kinds[1]:
        said = [kind or "a dump" for kind in kinds]
        raise NotComparableError(
            f"{benchmark.name} holds {said[0]}, {target.name} {said[1]}: compare dumps with dumps, "
            "and rollouts with rollouts of one kind"
        )


def require_once(pairs: Iterable[tuple[int, int]]) -> None:
    """Refuse a step that is to be compared with two others: one of them would be left out.

    Raises:
        UsageError: it is, of either side.
    """
    pairs = list(dict.fromkeys(pairs))
    for side, at in (("benchmark", 0), ("target", 1)):
        met: dict[int, tuple[int, int]] = {}
        for pair in pairs:
            other = met.setdefault(pair[at], pair)
            if other != pair:
                said = " and ".join(f"{b}:{t}" for b, t in (other, pair))
                raise UsageError(
                    f"--map-step {said} name step {pair[at]} of the {side} twice; give each step "
                    "once, and compare the others in a call of their own"
                )


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


def _single(
    benchmark: Side, target: Side, names: Sequence[str], steps: Mapping[int, int]
) -> StagePlan:
    (first, source_b), (second, source_t) = (*benchmark.stages.items(), *target.stages.items())
    if len(names) > 1:
        raise UsageError("both sides are a single stage: give one --stage, its name")
    notes: list[Said] = []
    if first != second and UNNAMED not in (first, second):
        notes.append(
            say(
                "stage {first} of the benchmark is compared with {second} of the target",
                first=first,
                second=second,
            )
        )
    name = names[0] if names else (first if first != UNNAMED else second)
    return _stage_plan(name, source_b, source_t, steps, notes)


def _stage_plan(
    stage: str,
    benchmark: StageSource | None,
    target: StageSource | None,
    steps: Mapping[int, int],
    notes: Sequence[Said] = (),
) -> StagePlan:
    own = [note for source in (benchmark, target) if source is not None for note in source.notes]
    notes = list(dict.fromkeys([*notes, *own]))
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
            (*notes, say("stage {stage} is on the {side} only", stage=stage, side=of_side(side))),
        )
    pairings, more = _pair_processes(benchmark, target, steps)
    notes = [*_frameworks(benchmark, target), *notes, *more]
    return StagePlan(stage, benchmark, target, tuple(pairings), tuple(notes))


def _frameworks(benchmark: StageSource, target: StageSource) -> list[Said]:
    """That the sides were dumped in two frameworks, where the dumps say so."""
    one, other = benchmark.framework, target.framework
    if one is None or other is None or one == other:
        return []
    return [
        say(
            "the benchmark was dumped in {one}, the target in {other}: another framework names and "
            "implements its operators otherwise; what found no partner by name, class or order is "
            "named in --rules, which also reads msprobe's mapping files",
            one=one,
            other=other,
        )
    ]


def _pair_processes(
    benchmark: StageSource, target: StageSource, map_steps: Mapping[int, int]
) -> tuple[list[Pairing], list[Said]]:
    notes: list[Said] = []
    have = [sorted({p.step for p in side.processes}) for side in (benchmark, target)]
    pairings: list[Pairing] = []
    said: list[Said] = []
    for step_b, step_t in pair_steps(have[0], have[1], map_steps, notes):
        step = step_b if step_b is not None else step_t
        assert step is not None
        at = (
            [p for p in benchmark.processes if p.step == step_b],
            [p for p in target.processes if p.step == step_t],
        )
        if all(at) and max(map(len, at)) > 1 and _nameless(benchmark, target, at):
            pairings += _by_content(step, (benchmark, target), at, said)
            continue
        ranks_b, ranks_t = ({p.rank: p for p in side} for side in at)
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
        if step_b is not None and step_t is not None and len(ranks_b) != len(ranks_t):
            said.append(
                say(
                    "numbers of ranks: benchmark {one}, target {other}; ranks of the same number "
                    "are compared; their samples and shards need not be the same, so activations "
                    "may differ in shape, and the other ranks' records are one-sided",
                    one=len(ranks_b),
                    other=len(ranks_t),
                )
            )
    return pairings, [*notes, *dict.fromkeys(said)]


def _nameless(
    benchmark: StageSource, target: StageSource, at: tuple[list[Process], list[Process]]
) -> bool:
    return any(
        side.unranked.intersection(processes)
        for side, processes in zip((benchmark, target), at, strict=True)
    )


def _by_content(
    step: int,
    sides: tuple[StageSource, StageSource],
    at: tuple[list[Process], list[Process]],
    notes: list[Said],
) -> list[Pairing]:
    """Processes of one step that ranks do not name."""
    # Imported here: most dumps say their ranks.
    from rlprobe.compare.match import processes

    tables = [[side.table(process) for process in own] for side, own in zip(sides, at, strict=True)]
    found: list[Pairing] = []
    labels: dict[bool, list[Said]] = {True: [], False: []}
    for number, pair in enumerate(processes.pair(*tables)):
        one = None if pair.benchmark is None else at[0][pair.benchmark]
        other = None if pair.target is None else at[1][pair.target]
        named = [
            say("none") if process is None else exactly(side.label(process))
            for side, process in zip(sides, (one, other), strict=True)
        ]
        labels[pair.guessed].append(say("{one} with {other}", one=named[0], other=named[1]))
        found.append(Pairing(step, number if one is None else one.rank, one, other))
    for guessed, how in (
        (False, say("by what they were given")),
        (True, say("in order, which is a guess: nothing they were given tells them apart")),
    ):
        if labels[guessed]:
            notes.append(
                say(
                    "step {step}: processes without ranks are paired {how} ({pairs}, benchmark "
                    "first)",
                    step=step,
                    how=how,
                    pairs=_listed(labels[guessed]),
                )
            )
    return found


def pair_steps(
    benchmark: Sequence[int],
    target: Sequence[int],
    map_steps: Mapping[int, int],
    notes: list[Said],
) -> list[tuple[int | None, int | None]]:
    """Steps of the benchmark and the target that are one; None where one side lacks it."""
    for own, other in map_steps.items():
        if own not in benchmark or other not in target:
            notes.append(
                say(
                    "--map-step {own}:{other}: the benchmark has {benchmark}, the target {target}",
                    own=own,
                    other=other,
                    benchmark=_steps(benchmark),
                    target=_numbers(target),
                )
            )
    if not map_steps:
        pairs = _pair(benchmark, target, "step", notes)
        if benchmark and target and all(None in pair for pair in pairs):
            notes.append(
                say(
                    "no step in common: the benchmark has {benchmark}, the target {target}; "
                    "where a run was resumed, --map-step {one}:{other} compares step {one} with "
                    "step {other}, and the others at the same distance",
                    benchmark=_steps(benchmark),
                    target=_numbers(target),
                    one=benchmark[0],
                    other=target[0],
                )
            )
        else:
            for side, alone in (
                ("benchmark", [b for b, t in pairs if t is None and b is not None]),
                ("target", [t for b, t in pairs if b is None and t is not None]),
            ):
                if alone:
                    given = {"steps": _numbers(alone), "side": of_side(side)}
                    notes.append(
                        say("step {steps} is on the {side} only", **given)
                        if len(alone) == 1
                        else say("steps {steps} are on the {side} only", **given)
                    )
        return pairs
    moved = next(t - b for b, t in map_steps.items()) if len(map_steps) == 1 else 0
    taken = set(map_steps.values())
    found: list[tuple[int | None, int | None]] = []
    for step in benchmark:
        partner = map_steps.get(step)
        if partner is None and step + moved not in taken:
            partner = step + moved
        found.append((step, partner if partner in target else None))
    met = {other for _, other in found}
    return [*found, *((None, step) for step in target if step not in met)]


def _steps(steps: Sequence[int]) -> Said:
    numbers = _numbers(steps)
    return (
        say("step {step}", step=numbers) if len(steps) == 1 else say("steps {steps}", steps=numbers)
    )


def _numbers(steps: Sequence[int]) -> Said:
    """Steps as ranges: 0 to 3, 7."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return _listed([
        say("{first} to {last}", first=r[0], last=r[-1]) if len(r) > 1 else exactly(str(r[0]))
        for r in found
    ])  # fmt: skip


def _listed(items: Sequence[str]) -> Said:
    """The first few."""
    return joined([*items[:_LISTED], *(["…"] if len(items) > _LISTED else [])], COMMA)


#: Pairs and steps named in a note.
_LISTED = 6
#: What is numbered, as a note calls it.
_WHAT = {"step": say("step"), "rank": say("rank")}


def _pair(
    benchmark: Sequence[int], target: Sequence[int], what: str, notes: list[Said]
) -> list[tuple[int | None, int | None]]:
    """Equal numbers together; a single one on either side together whatever its number."""
    left, right = sorted(set(benchmark)), sorted(set(target))
    if len(left) == len(right) == 1 and left != right:
        notes.append(
            say(
                "{what} {one} of the benchmark is compared with {what} {other}",
                what=_WHAT[what],
                one=left[0],
                other=right[0],
            )
        )
        return [(left[0], right[0])]
    return [(n if n in left else None, n if n in right else None) for n in sorted({*left, *right})]
