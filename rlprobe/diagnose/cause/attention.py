"""Where attention makes something else of queries, keys and values that agree.

Its probabilities tell most, where an eager kernel gives them out. But for a mask that masks
nothing, and a rounding, which leave marks of their own, statistics tell what differs and not why:
other angles, another scale, another mask and noise all move probabilities about.
"""

from __future__ import annotations

import re

import polars as pl

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.around import Scene, Symptoms, few_tokens
from rlprobe.diagnose.cause.differences import Probabilities, Record, slot
from rlprobe.judge import origin as kinds
from rlprobe.judge.row import Row, first, number
from rlprobe.said import Said, say

#: Where a look at probabilities is worth while: operators by any part of their name, modules by the
#: end of theirs (``post_attention_layernorm`` and ``attn_out_proj`` only stand beside one).
_OPERATOR = re.compile(r"attention|attn", re.IGNORECASE)
_MODULE = re.compile(r"(attention|attn)$", re.IGNORECASE)
#: Difference of first or last tokens, relative to the others', from which on they are touched.
_TOUCHED = 0.2
#: Likewise up to which next to nothing of them differs.
_HARDLY = 0.01


def is_one(scene: Scene) -> bool:
    """Whether the origin is called an attention, and what differs is no input of the stage."""
    operator = scene.origin.operator or scene.row.get("op")
    module = (scene.origin.module or "").rpartition(".")[2]
    return bool(_OPERATOR.search(str(operator)) or _MODULE.search(module))


def symptoms(scene: Scene) -> Symptoms:
    """The record and the probabilities, and how they differ."""
    said = [
        say("queries, keys and values agree and what attention makes of them does not")
        if scene.origin.kind == kinds.GLUE
        else say("the attention's output differs")
    ]
    said += _along(scene)
    found: list[object] = [
        Record.of(scene.finding, scene.row, inside=scene.is_inside, what=slot(scene.row))
    ]
    chances = _chances(scene)
    if chances is None:
        said.append(say("its probabilities are not among the records"))
    elif not chances["beyond"]:
        said.append(say("attention probabilities agree: values are put together otherwise"))
        if measure.lacks(scene.row):
            said.append(
                say(
                    "its result is as where a part of it is set to 0 ({error:.1%} of its "
                    "square) and the rest is as before",
                    error=measure.of(scene.row).error ** 2,
                )
            )
    else:
        found.append(Probabilities(chances))
        said += _moved(chances)
    return Symptoms(found, said)


def _moved(chances: Row) -> list[Said]:
    """How the probabilities differ, in words."""
    own = measure.of(chances)
    said = [say("attention probabilities differ by {error:.2g}", error=own.error)]
    before, after = chances.get("mean_benchmark"), chances.get("mean_target")
    if before and after:
        said[0] += say(" and sum to {after:.7g} times the benchmark's", after=after / before)
    if own.factor is not None:
        said[0] += say("; their norm is {factor:.5g} times the benchmark's", factor=abs(own.factor))
    if (chances["max_target"] or 0.0) < 1 == chances["max_benchmark"]:
        said.append(say("no probability is 1 any more"))
    return said


def _along(scene: Scene) -> list[Said]:
    """Where along sequences the result parts, in words."""
    said = []
    onset = [d for d in scene.finding.key_data if d.position is not None and d.error]
    beyond = {outcome.name for outcome in scene.finding.outcomes if outcome.excess > 1}
    onset = [d for d in onset if d.name in beyond] or onset  # what noise explains parts nowhere
    if onset:
        first = min(onset, key=lambda d: d.position or 0)
        said.append(
            say(
                "{name}: token {position} of the response is the first that differs by a tenth of "
                "the largest difference or more, in the sample that differs most",
                name=first.name,
                position=first.position,
            )
        )
    profile = scene.profile
    if profile is None:
        return said
    if profile.few is not None:
        return said + few_tokens(scene)
    if profile.onset is not None:
        said.append(say("the block's output parts from position {onset} on", onset=profile.onset))
    for name, size in ((say("first"), profile.first), (say("last"), profile.last)):
        if not size:
            said.append(say("the {name} tokens of sequences do not differ", name=name))
            continue
        touched = say("differ") if size > _TOUCHED else say("differ less")
        if size <= _HARDLY:
            touched = say("hardly differ")
        said.append(
            say(
                "the {name} tokens of sequences {touched} ({size:.2g} of the others' error)",
                name=name,
                touched=touched,
                size=size,
            )
        )
    return said


def _chances(scene: Scene) -> Row | None:
    """Attention probabilities of the same call, where an eager kernel gave them out."""
    rows = scene.finding.stage.rows.filter(
        (pl.col("module") == pl.lit(scene.origin.module, pl.String))
        & (pl.col("micro_batch") == scene.row["micro_batch"])
        & (pl.col("phase") == scene.row["phase"])
        & (pl.col("slot") == "output")
        & (pl.col("shape_benchmark").list.len() == 4)
        & pl.col("error").is_not_null()
    )
    row = first(rows)
    if row is None:
        return None
    ends = [number(row, f"{n}_{s}") for s in ("benchmark", "target") for n in ("min", "max")]
    known = [end for end in ends if end is not None]
    chances = len(known) == len(ends) and known[0] >= -1e-6 and known[1] <= 1.001
    return row if chances else None
