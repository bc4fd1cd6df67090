"""What was recorded says the same of itself: formats, digests, rows of key data, gradient norms.

Numbers that agree prove little where they were not recorded alike. None of this is a divergence of
a module, so it is a caveat and names the first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import (
    by_coordinates,
    clipping,
    contradictions,
    gaps,
    gradient_norms,
    impossible,
    partial,
    placed,
)
from rlprobe.diagnose.gate.evidence import Evidence, caveat, rows_of
from rlprobe.judge import keydata, metrics, optimizers
from rlprobe.judge.analysis import Step
from rlprobe.judge.excuse import LOPSIDED
from rlprobe.judge.extent import is_computed
from rlprobe.judge.keydata import Difference
from rlprobe.judge.reasons import NO_NUMBERS, NO_PARTNER, UNREADABLE
from rlprobe.judge.roundoff import UNIT
from rlprobe.said import COMMA, SEMICOLON, Said, joined, listed, say

ITEM = "recorded alike"
_MAX_BYTES = 1 << 20
#: What ranks that were given one number have of it.
_SAME = 1e-6
_RANK = re.compile(r" rank\d+")
_SIDES = ("benchmark", "target")
_GRAD_NORM = "*_grad_norm"
_TOTAL = "_total_grad_norm"
#: Before the number of one of an optimizer's several parameter groups.
_GROUP = " group"


def check(evidence: Evidence) -> GateItem | None:
    """Item ``recorded alike``; None where nothing contradicts itself."""
    said = [
        *_formats(evidence),
        *contradictions.check(evidence),
        *by_coordinates.check(evidence),
        *partial.check(evidence),
        *placed.copies(evidence),
        *_parameters(evidence),
        *_proofs(evidence),
        *_weights(evidence),
        *_unpaired(evidence),
        *gaps.check(evidence.step),
        *_numbers(evidence),
        *impossible.check(evidence.step),
        *_metrics(evidence),
        *gradient_norms.check(evidence),
        *clipping.check(evidence),
        *_told(evidence),
    ]
    if not said:
        return None
    return caveat(
        ITEM,
        joined(said, SEMICOLON),
        say(
            "look at these records on both sides: what records them, or what computes them, differs"
        ),
    )


def _formats(evidence: Evidence) -> list[Said]:
    """Floating-point formats that differ, under one precision on like devices."""
    if not evidence.results.plan.one_precision:
        return []
    floats = [pl.col(f"dtype_{side}").is_in(list(UNIT)) for side in ("benchmark", "target")]
    other = pl.all_horizontal(*floats) & (pl.col("dtype_benchmark") != pl.col("dtype_target"))
    found = [
        say(
            "{name}: {count:,} records have another format, first {first} "
            "({dtype_benchmark} against {dtype_target})",
            name=name,
            count=rows.height,
            first=rows.item(0, "name"),
            dtype_benchmark=rows.item(0, "dtype_benchmark"),
            dtype_target=rows.item(0, "dtype_target"),
        )
        for name, rows in rows_of(evidence.step, other)
    ]
    other_formats = [
        f"{name} ({' against '.join(difference.formats)})"
        for name, difference in evidence.step.key_data.items()
        if difference.formats[0] != difference.formats[1]
    ]
    if other_formats:
        found.append(say("key data have another format: {names}", names=listed(other_formats, 4)))
    return found


def _numbers(evidence: Evidence) -> list[Said]:
    """Records of which one side alone has numbers; texts and whole numbers have none."""
    there = [pl.col(f"norm_{side}").is_not_null() for side in _SIDES]
    floats = pl.all_horizontal(pl.col(f"dtype_{side}").is_in(list(UNIT)) for side in _SIDES)
    lone = (pl.col("unjudged_because") == NO_NUMBERS) & floats & (there[0] != there[1])
    return [
        say(
            "{name}: {count:,} records have numbers on one side only and were not judged, "
            "first {first}",
            name=name,
            count=rows.height,
            first=rows.item(0, "name"),
        )
        for name, rows in rows_of(evidence.step, lone)
    ]


def _metrics(evidence: Evidence) -> list[Said]:
    """What the trainer reports of the step on one side only, and what is 0 and cannot be."""
    sides = [
        {
            name: value
            for line in run.metrics()
            if line.get("step") == evidence.step.number
            for name, value in (line.get("metrics") or {}).items()
            # a text is no number that a side has
            if is_computed(name) and isinstance(value, int | float)
        }
        for run in (evidence.benchmark, evidence.target)
    ]
    lone = sorted(sides[0].keys() ^ sides[1].keys())
    zero = [
        name
        for name, value in sides[0].items()
        if metrics.is_never_zero(name) and value == 0 and sides[1].get(name) == 0
    ]
    found = [say("metrics on one side only: {lone}", lone=listed(lone, 4))] if lone else []
    found += _not_finite(evidence.step, sides)
    if zero:
        found.append(
            say("0 on both sides, which proves no agreement: {zero}", zero=listed(zero, 4))
        )
    return found


def _not_finite(step: Step, sides: Sequence[Mapping[str, float]]) -> list[Said]:
    """Metrics that are not finite on both sides, or of which a part is not: neither is judged."""
    shared = sorted(sides[0].keys() & sides[1].keys())
    finite = {name: [math.isfinite(side[name]) for side in sides] for name in shared}
    odd = [name for name in shared if not any(finite[name])]
    made_of = metrics.not_finite(step)
    parts = [
        say("{metric} ({parts})", metric=name, parts=joined(own, COMMA))
        for name in shared
        if all(finite[name])
        and (own := [p for p, made in made_of.items() if any(m.search(name) for m in made)])
    ]
    found = []
    if odd:
        found.append(
            say("metrics that are not finite on both sides and were not judged: {names}",
                names=listed(odd, 4))
        )  # fmt: skip
    if parts:
        found.append(
            say("metrics made of numbers that are not finite on both sides: {names}",
                names=listed(parts, 4))
        )  # fmt: skip
    return found


def _parameters(evidence: Evidence) -> list[Said]:
    """Records of parameters that differ; their weights are digested apart, by item ``weights``.

    Those of a later update inherit what the first has left, and are judged as its changes.
    """
    found = []
    for name, finding in evidence.step.findings.items():
        other = (pl.col("excess") > 1).fill_null(False) | LOPSIDED
        held = pl.col("judged") & (pl.col("slot") == "parameters")
        rows = finding.stage.rows.filter(held & other)
        if rows.height:
            found.append(
                say(
                    "{name}: {count:,} records of parameters differ, first {first}",
                    name=name,
                    count=rows.height,
                    first=rows.item(0, "name"),
                )
            )
    return found


def _proofs(evidence: Evidence) -> list[Said]:
    """Stages that said on one side only which samples they worked on."""
    sides = [
        {(entry["stage"], entry["step"], entry["rank"]) for entry in run.mock_proof() or []}
        for run in (evidence.benchmark, evidence.target)
    ]
    if not all(sides) or {len({rank for _, _, rank in side}) for side in sides} != {1}:
        return []  # other ranks hold other samples: item ``mock proof`` compares them as a whole
    lone = sorted(
        say("{stage}, step {step}", stage=stage, step=step)
        for stage, step, _ in sides[0] ^ sides[1]
        if step == evidence.step.number and stage in _on_both(evidence)
    )
    return (
        [say("samples were digested on one side only: {lone}", lone=listed(lone, 4))]
        if lone
        else []
    )


def _weights(evidence: Evidence) -> list[Said]:
    """Parameters whose digest one side has and the other has not, where ranks hold the same."""
    runs = (evidence.benchmark, evidence.target)
    tables = [run.weights() for run in runs]
    if any(table is None for table in tables) or runs[0].manifest.layout != runs[1].manifest.layout:
        return []
    keys = [
        {
            row
            for row in table.select("name", "stage", "step", "rank").iter_rows()
            if row[1] in _on_both(evidence)
        }
        for table in tables
        if table is not None
    ]
    lone = sorted(
        say("{name} ({stage}, step {step})", name=name, stage=stage, step=step)
        for name, stage, step, _ in keys[0] ^ keys[1]
    )
    return [say("weights digested on one side only: {lone}", lone=listed(lone, 4))] if lone else []


def _on_both(evidence: Evidence) -> set[str]:
    """Stages that both sides ran: a replay generates nothing."""
    runs = (evidence.benchmark, evidence.target)
    ran = [
        {name for name, s in run.manifest.stages.items() if s.state == "captured"} for run in runs
    ]
    return ran[0] & ran[1]


def _unpaired(evidence: Evidence) -> list[Said]:
    """Key data of which one side has rows that the other has not."""
    found = _lone_rows(evidence.step)
    runs = (evidence.benchmark, evidence.target)
    sides = [set(keydata.names(run)) for run in runs]
    number = evidence.step.number
    empty = {
        name
        for name in (sides[0] & sides[1])
        - {known.removesuffix(keydata.LATER) for known in evidence.step.key_data}
        - keydata.FREE.keys()
        if bool(keydata.load(runs[0], name, number)) != bool(keydata.load(runs[1], name, number))
    }
    lone = sorted((sides[0] ^ sides[1]) | empty)
    if lone and all(sides):
        found.append(say("key data on one side only: {lone}", lone=listed(lone, 6)))
    return found


def of_dumps(step: Step) -> GateItem | None:
    """The same item, of the key data of two dumps."""
    said = _lone_rows(step)
    said += [
        say(
            "{name} of {stage}, of which no floating-point forward record was compared, was not "
            "judged and {apart}",
            name=name,
            stage=keydata.stage_of(name),
            apart=_apart(difference),
        )
        for name, difference in sorted(step.key_data.items())
        if (difference.error or any(difference.lopsided)) and _has_no_floor(step, name)
    ]
    for because, words in (
        (NO_PARTNER, say("key data on one side only")),
        (UNREADABLE, say("key data that can no longer be read, or never could")),
    ):
        names = sorted(name for name, why in step.absent.items() if why == because)
        said += [say("{words}: {names}", words=words, names=listed(names, 6))] if names else []
    if not said:
        return None
    return caveat(
        ITEM,
        joined(said, SEMICOLON),
        say("save the same key data of the same samples and stages on both sides"),
    )


def _apart(difference: Difference) -> Said:
    if any(difference.lopsided):
        return say("is finite on one side only at {count:,} values", count=sum(difference.lopsided))
    return say("differs by {error:.3g} (relative L2)", error=difference.error)


def _has_no_floor(step: Step, name: str) -> bool:
    """Whether nothing says by how much round-off may move a result, or anything of its stage."""
    stage = keydata.stage_of(name)
    finding = step.findings.get(stage)
    if finding is None:
        return True
    own = keydata.result_of(name) == stage
    return own and name not in {outcome.name for outcome in finding.produced}


def _lone_rows(step: Step) -> list[Said]:
    return [
        say(
            "{name}: {benchmark_only} rows on the benchmark only, {target_only} on the target only",
            name=name,
            benchmark_only=difference.benchmark_only,
            target_only=difference.target_only,
        )
        for name, difference in sorted(step.key_data.items())
        if difference.benchmark_only or difference.target_only
    ]


def _told(evidence: Evidence) -> list[Said]:
    """What one side alone says that its optimizers were told, at any captured step."""
    both = {*evidence.benchmark.manifest.steps} & {*evidence.target.manifest.steps}
    found = []
    for stage in sorted(stages.UPDATE_STAGES & {*evidence.results.stages()}):
        each = [optimizers.lone(evidence.benchmark, evidence.target, stage, step) for step in both]
        settings = sorted({name for one in each for name in one.settings})
        parameters = sorted({name for one in each for name in one.parameters})
        if settings or parameters:
            found.append(
                say(
                    "{stage}: one side alone says what its optimizer was told: {names}",
                    stage=stage,
                    names=listed([*settings, *parameters], 4),
                )
            )
    return found
