"""Is it noise? Every stage of a captured step, judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

from rlprobe.errors import DumpError
from rlprobe.judge import (
    given,
    handed_on,
    keydata,
    reasons,
    replicas,
    roundings,
    sources,
    stage,
    tokens,
)
from rlprobe.judge.analysis import OUTCOME, Finding, Step
from rlprobe.judge.excuses import padding_only
from rlprobe.judge.first import first_of
from rlprobe.judge.handed_on import Dropped
from rlprobe.judge.inputs import Results
from rlprobe.judge.keydata import Difference, Row
from rlprobe.judge.logical import layout
from rlprobe.judge.origin import Origin
from rlprobe.judge.outcomes import Outcome, gradients
from rlprobe.judge.stage import Stage
from rlprobe.judge.stage_results import results_of, row_of
from rlprobe.judge.with_buffers import with_buffers
from rlprobe.judge.with_settings import with_settings
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.said import say

if TYPE_CHECKING:
    from rlprobe.store.read import Run


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
        findings = [with_settings(finding, results) for finding in findings]
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
    first, rank = first_of(stage, produced)
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
    first, rank = first_of(stage, finding.produced)
    return dataclasses.replace(finding, stage=stage, origin=first, rank=rank)


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
    origin = Origin(OUTCOME, None, worst.name, row_of(worst), reason)
    return dataclasses.replace(
        finding, given=handed, origin=origin, rank=finding.stage.processes[0].rank
    )


def _following(finding: Finding, excused: list[pl.DataFrame]) -> Finding:
    """A stage without results of its own follows others where the same records differ likewise."""
    if finding.origin is None or finding.outcomes:
        return finding
    excuses = padding_only.elsewhere(finding.stage.rows, excused)
    if not excuses:
        return finding
    stage = finding.stage.excused(excuses)
    return dataclasses.replace(finding, stage=stage, origin=None, rank=None)
