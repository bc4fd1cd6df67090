"""Is it noise? Every stage of a captured step, judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import polars as pl

from rlprobe import stages
from rlprobe.errors import DumpError
from rlprobe.judge import (
    execution,
    given,
    handed_on,
    keydata,
    layers,
    optimizers,
    origin,
    reasons,
    replicas,
    roundings,
    sources,
    stage,
    tokens,
)
from rlprobe.judge import row as judged_rows
from rlprobe.judge.analysis import OUTCOME, Finding, Step
from rlprobe.judge.excuses import padding_only
from rlprobe.judge.handed_on import Dropped
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference, Row
from rlprobe.judge.logical import layout
from rlprobe.judge.noise import SAFETY
from rlprobe.judge.origin import SETTING, Origin
from rlprobe.judge.outcomes import ALL_VALUES, OTHER_FORMAT, Outcome, gradients, nearer, tail
from rlprobe.judge.roundoff import ELEMENTARY, FP32, UNIT
from rlprobe.judge.stage import Stage
from rlprobe.judge.with_buffers import with_buffers
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import of_side, say
from rlprobe.store.read import Run

#: What an elementwise computation in fp32 may differ by, of numbers that are equal.
_LAST = SAFETY * ELEMENTARY**0.5 * FP32


@dataclass
class Kept:
    """What was found of files that are still as they were: taken as it is, and added to.

    For whoever judges one alignment many times (:mod:`rlprobe.selftest.blind`).
    """

    #: By name and step; None of a stage of which nothing was compared.
    stages: dict[tuple[str, int], Stage | None] = field(default_factory=dict)
    #: By step and the micro-batches of each stage before its weights change.
    key_data: dict[tuple[int, tuple[tuple[str, int | None], ...]], dict[str, Difference]] = field(
        default_factory=dict
    )
    #: By name and step, with the stage and key data that it was made of.
    findings: dict[tuple[str, int], tuple[Stage, dict[str, Difference], Finding]] = field(
        default_factory=dict
    )


def judge(results: Results, step: int, kept: Kept | None = None) -> Step:
    """Judge every planned stage of a step.

    Args:
        results: what was compared.
        step: captured step, from 0.
        kept: what need not be looked at again, and where what is looked at goes.

    Raises:
        DumpError, StoreError: a table or file is damaged.
    """
    found = Step(step)
    kept = Kept() if kept is None else kept
    loaded = _loaded(results, step, kept)
    passes = {one.name: one.before_update for one in loaded}
    at = (step, tuple(sorted(passes.items())))
    if at not in kept.key_data:
        kept.key_data[at] = key_data(results, step, passes)
    found.key_data = kept.key_data[at]
    if results.of_dumps:
        found.absent = sources.absent(results, step)
    # what an engine generates freely is its own business: it may choose another token
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    free = {
        name
        for run in runs
        if run is not None
        for name in keydata.names(run)
        if keydata.is_there(run, name, step)
    }
    found.absent |= dict.fromkeys(free & set(keydata.FREE), reasons.GENERATED)
    found.key_data, found.dropped = _handed_on(loaded, found.key_data)
    padded = all(run is not None and keydata.pads(run, step) for run in runs)
    handed = (
        {}
        if results.of_dumps
        else {one.name: given.outcomes(found.key_data, one.name) for one in loaded}
    )
    asked = _Asked(
        padded,
        not results.of_dumps and results.plan.one_precision and _alike(runs),
        lambda name: tokens.of_calls(results, name, step),
    )
    findings = [
        _with_given(_kept_finding(one, found.key_data, asked, kept), handed.get(one.name, []))
        for one in loaded
    ]
    excused = [finding.padding_only for finding in findings if finding.confined]
    findings = [_following(finding, excused) for finding in findings]
    if not results.of_dumps:
        findings = [_with_settings(finding, _told(results, finding.stage)) for finding in findings]
        findings = [with_buffers(finding, results) for finding in findings]
    found.findings = {finding.stage.name: finding for finding in findings}
    return found


def _handed_on(
    loaded: Collection[Stage], key_data: dict[str, Difference]
) -> tuple[dict[str, Difference], list[Dropped]]:
    """Key data, of which results that differ nowhere but where they are dropped are narrowed to
    what is handed on; and those."""
    dropped = []
    for one in loaded:
        for whole in results_of(one, key_data):
            if whole.excess <= 1 or keydata.result_of(whole.name) != one.name:
                continue
            found = handed_on.narrowed(key_data, whole.name)
            if found is None:
                continue
            narrow = key_data | found[0]
            if all(o.excess <= 1 for o in results_of(one, narrow) if o.name == whole.name):
                key_data = narrow
                dropped.append(found[1])
    return key_data, dropped


def _loaded(results: Results, step: int, kept: Kept) -> list[Stage]:
    factors = roundings.products(results.run(BENCHMARK), results.run(TARGET))
    for name in results.stages():
        if (name, step) not in kept.stages:
            kept.stages[name, step] = stage.load(results, name, step, factors)
    every = [kept.stages[name, step] for name in results.stages()]
    return [one for one in every if one is not None]


@dataclass(frozen=True)
class _Asked:
    """What is known of both runs: whether batches are padded, and results' formats must agree; and
    where the tokens of a stage are looked up."""

    padded: bool
    one_format: bool
    tokens: Callable[[str], pl.DataFrame | None] = lambda name: None


def _alike(runs: Collection[Run | None]) -> bool:
    """Whether one back end trains on both sides: another may hand on log-probs in another format.

    FSDP's are of the format of its logits, Megatron's of fp32.
    """
    backends = {
        frozenset((process.backend or "").lower() for process in run.manifest.layout)
        for run in runs
        if run is not None
    }
    return len(backends) == 1


def _kept_finding(
    stage: Stage, key_data: dict[str, Difference], asked: _Asked, kept: Kept
) -> Finding:
    at = (stage.name, stage.step)
    known = kept.findings.get(at)
    if known is None or known[0] is not stage or known[1] is not key_data:
        known = kept.findings[at] = stage, key_data, _finding(stage, key_data, asked)
    return known[2]


def key_data(
    results: Results,
    step: int,
    before_update: Mapping[str, int | None],
    only: Collection[str] | None = None,
) -> dict[str, Difference]:
    """Differences by name; of an update's results what came after weights first changed apart,
    as ``{name}{keydata.LATER}``.

    Args:
        results: where both runs are found.
        step: captured step, from 0.
        before_update: micro-batches of each stage before weights change; None for all.
        only: names that are asked for; None: all that both sides have.

    Raises:
        DumpError: key data are damaged.
    """
    benchmark, target = sources.both(results, step)
    if benchmark is None or target is None:
        return {}
    shared = sorted((set(benchmark.data.keys()) & set(target.data.keys())) - set(keydata.FREE))
    if only is not None:
        shared = [name for name in shared if name in only]
    found = {}
    for name in shared:
        try:
            left, right = benchmark.rows(name), target.rows(name)
        except DumpError:
            if results.of_dumps:  # compared with a note; among what is absent
                continue
            raise
        before = before_update.get(keydata.result_of(name) or "")
        if before is None:
            if left and right:
                found[name] = _worst(results, left, right, name, step)
            continue
        for called, is_late in ((name, False), (name + keydata.LATER, True)):
            parts = [[r for r in rows if (r.micro_step >= before) == is_late]
                     for rows in (left, right)]  # fmt: skip
            if all(parts):
                found[called] = _worst(results, parts[0], parts[1], called, step)
            elif any(parts):  # one side has no row of these updates, and rows of others
                found[called] = keydata.compare(parts[0], parts[1], called, step)
    return found


def _worst(results: Results, left: list[Row], right: list[Row], name: str, step: int) -> Difference:
    """Rows of both sides compared; where one has more replicas of a model, the farthest of them."""
    runs = [results.run(role) for role in (BENCHMARK, TARGET)]
    stage = keydata.stage_of(name)
    if layout.unlike(results, stage) is not None:
        left, right = ([_of_tokens(row) for row in rows] for rows in (left, right))
    sides = [
        replicas.alternatives(rows, lambda row: row.rank, replicas.data_ranks(run, stage))
        for run, rows in zip(runs, (left, right), strict=True)
        if run is not None
    ]
    if len(sides) < len(runs) or len(sides[0]) == len(sides[1]):
        return keydata.compare(left, right, name, step)
    every = [keydata.compare(b, t, name, step) for b in sides[0] for t in sides[1]]
    return max(every, key=lambda found: (max(found.lopsided), found.error or 0.0))


def _of_tokens(row: Row) -> Row:
    """A row without the entry that is about no token.

    Over a sequence, entry i is about token i + 1. What stands last is of whatever follows the
    sequence in its row: another sample, its own begin, or the padding that shards are filled with.
    """
    if not row.response_at or len(row.values) < 2:
        return row
    return dataclasses.replace(row, values=row.values[:-1])


def _finding(stage: Stage, key_data: dict[str, Difference], asked: _Asked) -> Finding:
    own = [d for d in key_data.values() if keydata.result_of(d.name) == stage.name]
    produced = results_of(stage, key_data, asked.one_format)
    outcomes = produced + gradients(stage.rows)
    first, rank = _first(stage, produced)
    excuses = padding_only.excuses(
        stage.rows, first, outcomes, asked.padded, lambda: asked.tokens(stage.name)
    )
    if excuses:
        stage, first, rank = stage.excused(excuses), None, None
    return Finding(stage, own, outcomes, produced, first, rank)


def besides(finding: Finding, rows: pl.Expr) -> Finding:
    """A finding as it is but for rows that are known to differ, which are no origin.

    Args:
        finding: of a stage.
        rows: boolean, over the columns of the stage's rows.
    """
    known = rows.fill_null(False)
    processes = [
        dataclasses.replace(
            process, rows=process.rows.with_columns(beyond=pl.col("beyond") & ~known)
        )
        for process in finding.stage.processes
    ]
    stage = dataclasses.replace(finding.stage, processes=processes)
    first, rank = _first(stage, finding.produced)
    return dataclasses.replace(finding, stage=stage, origin=first, rank=rank)


def results_of(
    stage: Stage, key_data: dict[str, Difference], one_format: bool = False
) -> list[Outcome]:
    """A stage's own key data, measured; and what it was given where that alone is not finite.

    Args:
        stage: judged.
        key_data: differences of every name.
        one_format: like devices of one back end were asked for one precision, so that a result
            whose numbers are all of a shorter format than the benchmark's was computed otherwise,
            however little off. An engine's own results are not: engines may be of two kinds.
    """
    floors = _floors(stage)
    own = [d for d in key_data.values() if keydata.result_of(d.name) == stage.name]
    # What a stage was given is judged by itself only where it is not finite on one side alone.
    odd = [d for d in key_data.values() if d not in own and any(d.lopsided)]
    odd = [d for d in odd if keydata.stage_of(d.name) == stage.name]
    # a choice of experts within round-off moves its token by any amount
    by_value = not any(process.near_ties for process in stage.processes)
    found = [_outcome(d, floors[d.name.endswith(keydata.LATER)], by_value) for d in own + odd]
    one_format = one_format and stage.name not in stages.ENGINE_STAGES
    rounded = {d.name for d in own if one_format and d.shorter is not None and d.error}
    return [
        dataclasses.replace(outcome, measure=OTHER_FORMAT)
        if outcome.name in rounded and outcome.excess <= 1
        else outcome
        for outcome in found
        if outcome is not None
    ]


def _floors(stage: Stage) -> tuple[float | None, float | None]:
    """Floors of what a stage hands on: before weights first change within it, and after.

    After it nothing bounds what it hands on where nothing that ran then was judged.
    """
    if stage.before_update is None:
        return _deepest(stage.rows), None
    early = pl.col("before_update")
    columns = (*_BOUNDING, "judged", "error")
    passing = judged_rows.columns_where(
        stage.rows, ~early & (pl.col("phase") == execution.FORWARD), *columns
    )
    held = passing.select((pl.col("judged") & pl.col("error").is_not_null()).any()).item()
    return _deepest(judged_rows.columns_where(stage.rows, early, *_BOUNDING)), _deepest(
        passing
    ) if held else None


def _outcome(difference: Difference, floor: float | None, by_value: bool) -> Outcome | None:
    """A result of a stage, joined by sample: all its values, and each by itself where asked for.

    None where no row could be joined, and where it differs and nothing says by how much it may
    (:data:`reasons.NO_FLOOR`); that it is finite on one side alone needs no floor.
    """
    if difference.error is None:
        return None
    alone = difference.lopsided
    if floor is None and difference.error and not any(alone):
        return None
    side = None if not any(alone) else "target" if alone[1] >= alone[0] else "benchmark"
    own = floor or 0.0
    whole = Outcome(difference.name, difference.error, own, max(alone), side, difference.count)
    return nearer(whole, difference.peak, tail(difference.count) * own) if by_value else whole


def _with_given(finding: Finding, handed: list[Outcome]) -> Finding:
    """A stage that computes alike and was given other numbers parts in what it was given."""
    known = {outcome.name for outcome in finding.produced}
    handed = [outcome for outcome in handed if outcome.name not in known]
    wrong = [outcome for outcome in handed if outcome.excess > 1]
    if finding.origin is not None or not wrong:
        return dataclasses.replace(finding, given=handed)
    worst = max(wrong, key=lambda outcome: outcome.excess)
    handed_back = worst.name in keydata.HANDED
    reason = (
        say(
            "{name}, which the stage handed back, differs by {error:.3g} where what it computed "
            "explains {floor:.2g}; all that it computes agrees",
            name=worst.name,
            error=worst.error,
            floor=worst.floor,
        )
        if handed_back
        else say(
            "{name}, which the stage was given, differs by {error:.3g} where its sources explain "
            "{floor:.2g}; all that it computes agrees",
            name=worst.name,
            error=worst.error,
            floor=worst.floor,
        )
    )
    origin = Origin(OUTCOME, None, worst.name, _row(worst), reason)
    return dataclasses.replace(
        finding, given=handed, origin=origin, rank=finding.stage.processes[0].rank
    )


def _told(results: Results, stage: Stage) -> optimizers.Told | None:
    benchmark, target = results.run(BENCHMARK), results.run(TARGET)
    if benchmark is None or target is None or stage.name not in stages.UPDATE_STAGES:
        return None
    return optimizers.compare(benchmark, target, stage.name, stage.step)


def _with_settings(finding: Finding, told: optimizers.Told | None) -> Finding:
    """A stage whose optimizer was told otherwise parts there, if nothing parts before it steps."""
    finding = dataclasses.replace(finding, told=told)
    if told is None or not told.differing:
        return finding
    found = finding.origin
    if found is not None and _place(found.row) < (told.update, execution.CHANGES):
        return finding
    if found is not None:
        row, rank = found.row, finding.rank
    else:
        row, rank = _change(finding.stage, told)
    reason = told.said(told.differing)
    origin = Origin(SETTING, told.module, "optimizer", row, reason)
    return dataclasses.replace(finding, origin=origin, rank=rank)


def _place(row: judged_rows.Row) -> tuple[int, int]:
    """Update and phase of the row of an origin; a result of a stage is made in its first pass."""
    phase = row.get("phase")
    late = str(row["name"]).endswith(keydata.LATER)
    update = row.get("update") or int(late)
    return update, execution.FORWARD if phase is None else int(phase)


def _change(stage: Stage, told: optimizers.Told) -> tuple[judged_rows.Row, int]:
    """A change that was made with a setting that differs, though by no more than its floor."""
    modules = [n.rpartition(".")[0] for one in told.differing for n in one.parameters]
    for process in stage.processes:
        changes = process.rows.filter(pl.col("phase") == execution.CHANGES)
        own = judged_rows.first(changes.filter(pl.col("module").is_in(modules)))
        row = own or judged_rows.first(changes)
        if row is not None:
            return {**row, "error": None, "excess": None}, process.rank
    name, phase = "optimizer", execution.CHANGES
    return {"name": name, "slot": "change", "phase": phase}, stage.processes[0].rank


def _row(outcome: Outcome) -> judged_rows.Row:
    """A result as the row of an origin."""
    return {"name": outcome.name, "error": outcome.error, "floor": outcome.floor,
            "excess": outcome.excess, "slot": "output",
            "error_kind": None if outcome.measure == ALL_VALUES else outcome.measure}  # fmt: skip


def _following(finding: Finding, excused: list[pl.DataFrame]) -> Finding:
    """A stage without results of its own follows others where the same records differ likewise."""
    if finding.origin is None or finding.outcomes:
        return finding
    excuses = padding_only.elsewhere(finding.stage.rows, excused)
    if not excuses:
        return finding
    stage = finding.stage.excused(excuses)
    return dataclasses.replace(finding, stage=stage, origin=None, rank=None)


#: Columns that :func:`_deepest` looks at.
_BOUNDING = ("dtype_benchmark", "dtype_target", "phase", "shape_benchmark", "slot", "floor")


def _deepest(rows: pl.DataFrame) -> float | None:
    """The floor of what follows the deepest forward record; None where none is of floats.

    Where all of them are equal to the last bit, what is computed of them last may still be rounded
    otherwise.
    """
    floats = [pl.col(f"dtype_{side}").is_in(list(UNIT)) for side in ("benchmark", "target")]
    forward = (
        (pl.col("phase") == execution.FORWARD)
        & pl.any_horizontal(floats).fill_null(False)
        & pl.col("shape_benchmark").is_not_null()
        & (pl.col("slot") != "parameters")
    )
    largest = rows.select(pl.col("floor").filter(forward).max()).item()
    return max(float(largest), _LAST) if isinstance(largest, float) else None


def _first(stage: Stage, produced: list[Outcome]) -> tuple[Origin | None, int | None]:
    """The earliest origin over all ranks; a result that differs comes after the forward records."""
    found = []
    for process in stage.processes:
        here = origin.find(process.rows, process.calls)
        if here is not None:
            row = here.row
            began = (row["update"], row["micro_batch"], row["phase"], row["sequence"])
            found.append((began, process.rank, here))
    beyond = [outcome for outcome in produced if outcome.excess > 1]
    # whatever parts in an update parts before what the next one hands on
    wrong = [o for o in beyond if not (found and o.name.endswith(keydata.LATER))]
    forward = [item for item in found if item[2].row["phase"] == execution.FORWARD]
    if wrong and not forward:
        worst = max(wrong, key=lambda outcome: outcome.excess)
        reason = say("all forward records agree within noise and {name} does not", name=worst.name)
        if worst.measure == OTHER_FORMAT:
            reason = say(
                "all forward records agree within noise, and {name} is of a shorter format than "
                "the benchmark's",
                name=worst.name,
            )
        if stage.misplaced:
            reason = say(
                "{name} differs, joined by sample; activations were not judged "
                "({misplaced}), so that no module can be named",
                name=worst.name,
                misplaced=stage.misplaced,
            )
        row = _row(worst)
        if worst.lopsided:
            row |= {"status": "nonfinite", "reason": worst.side}
            agree = (
                say("activations were not judged") if stage.misplaced else say("all modules agree")
            )
            reason = say(
                "{name}: not finite at {lopsided:,} of {count:,} values on the {side} "
                "only; {agree}",
                name=worst.name,
                lopsided=worst.lopsided,
                count=worst.count,
                side=of_side(str(worst.side)),
                agree=agree,
            )
        return Origin(OUTCOME, None, worst.name, row, reason), stage.processes[0].rank
    if not found:
        return None, None
    if layers.apart([process.rows for process in stage.processes]):
        # what a pipeline rank was given by another is inherited where that one's own is found
        made = {item[2].row["phase"] for item in found if not origin.received(item[2])}
        found = [
            item
            for item in found
            if not origin.received(item[2]) or item[2].row["phase"] not in made
        ]
    _, rank, first = min(found, key=lambda item: (item[0], item[1]))
    return first, rank
