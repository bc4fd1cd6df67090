"""Whether both sides clip their gradients to one norm, whatever the gradients differ by.

Clipping multiplies all gradients of an update by ``min(1, m / norm)``. So the norm of all clipped
gradients is m on both sides where both clip, and that of the gradients where neither does: it does
not depend on what round-off made of any gradient, and is held to much less than single gradients
are, whose floors in 16 bits hide a factor of some per cent.

Where ranks hold parts by tensor, pipeline or expert parallelism, some gradients are there several
times and the norm of all is not a sum over the ranks. But all are multiplied by one factor, which
their norms before and after show however often each is counted; and the norm that the trainer
reported, times this factor, is what it clipped to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.gate import gradient_norms
from rlprobe.diagnose.gate.evidence import Evidence
from rlprobe.judge.roundoff import UNIT
from rlprobe.said import Said, say

#: A clipped norm that is as far below its gradients' was clipped.
_CLIPPED = 1e-5
#: What sums of squares differ by, added up otherwise in fp32.
_SUMMED = 1e-4


def check(evidence: Evidence) -> list[Said]:
    """A sentence for each stage and update whose clipped gradients have another norm."""
    found = []
    for name, finding in sorted(evidence.step.findings.items()):
        if name not in stages.UPDATE_STAGES:
            continue
        own_norms = _updates(finding.stage.rows)
        if not _is_whole(evidence, name):
            own_norms = _reported(own_norms, evidence, stages.MODEL_ROLE[name])
        for update, own in own_norms:
            (b, clipped_b), (t, clipped_t) = own
            if not _agree(own, _allowed(finding.stage.rows)):
                found.append(
                    say(
                        "{stage}, update {update}: clipping leaves gradients a norm of "
                        "{benchmark:.6g} (of {before_b:.6g}) on the benchmark and of {target:.6g} "
                        "(of {before_t:.6g}) on the target",
                        stage=name, update=update, benchmark=clipped_b, before_b=b,
                        target=clipped_t, before_t=t,
                    )
                )  # fmt: skip
    return found


_Sides = tuple[tuple[float, float], tuple[float, float]]


def _updates(rows: pl.DataFrame) -> Iterator[tuple[int, _Sides]]:
    """By update: of each side the norm of all gradients before clipping and after.

    Of updates alone of which both sides recorded all gradients, before and after.
    """
    of_gradients = rows.filter(pl.col("slot").is_in(["grad_reduced", "grad_clipped"]))
    sides = ("norm_benchmark", "norm_target")
    for own in of_gradients.with_columns(update=pl.col("call").fill_null(0)).partition_by("update"):
        before, after = (own.filter(slot=slot) for slot in ("grad_reduced", "grad_clipped"))
        known = all((own[side].is_finite() & own[side].is_not_null()).all() for side in sides)
        if known and before.height == after.height:
            b, t = ((math.hypot(*before[side]), math.hypot(*after[side])) for side in sides)
            yield int(own["update"][0]), (b, t)


def _reported(
    updates: Iterable[tuple[int, _Sides]], evidence: Evidence, role: str
) -> Iterator[tuple[int, _Sides]]:
    """The same by the norms that the trainers reported, scaled as their gradients were.

    Of updates of which both sides' processes reported one norm each.
    """
    runs = (evidence.benchmark, evidence.target)
    totals = [gradient_norms.totals(run, role, evidence.step.number) for run in runs]
    for update, own in updates:
        norms = [total.get(update, 0.0) for total in totals]
        if all(math.isfinite(norm) and norm > 0 for norm in norms) and all(b for b, _ in own):
            b, t = ((n, n * after / before) for n, (before, after) in zip(norms, own, strict=True))
            yield update, (b, t)


def _is_whole(evidence: Evidence, stage: str) -> bool:
    """Whether the ranks' gradients add up to all of them, none counted twice in some."""
    role = stages.MODEL_ROLE[stage]
    return all(
        process.tp == process.ep == process.pp == 1
        for run in (evidence.benchmark, evidence.target)
        for process in run.manifest.layout
        if process.role == role
    )


def _agree(sides: _Sides, allowed: float) -> bool:
    """Whether one bound on the norm explains both sides' clipped gradients."""
    clips = [after < before * (1 - max(_CLIPPED, allowed)) for before, after in sides]
    (before_b, after_b), (before_t, after_t) = sides
    if not all(clips) and any(clips):
        # the bound lies between: what is clipped comes to it, what is not is below it
        bound, free = (after_b, before_t) if clips[0] else (after_t, before_b)
        return free <= bound * (1 + allowed)
    if all(clips):
        return abs(after_b - after_t) <= allowed * max(after_b, after_t)
    # neither: each has its own norm still, and no more than that
    return all(abs(after - before) <= allowed * before for before, after in sides)


def _allowed(rows: pl.DataFrame) -> float:
    """One rounding to the coarsest format that clipped gradients are kept in.

    Of many elements, each rounded by itself, the norm is off by much less.
    """
    kept = rows.filter(slot="grad_clipped")
    formats = {*kept["dtype_benchmark"].drop_nulls(), *kept["dtype_target"].drop_nulls()}
    return max([_SUMMED, *(UNIT[one] for one in formats if one in UNIT)])
