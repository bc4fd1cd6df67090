"""Records that one side lacks, or has of another shape, where the same of other calls agree.

Another kernel records otherwise wherever it runs: a mask, attention's weights, what runs within
experts have no partner in any call and any layer. What has a partner in one call or layer and none
in another is no kernel's doing: it was lost, or is not what it was called.
"""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from rlprobe import stages
from rlprobe.judge.analysis import Step
from rlprobe.judge.reasons import NO_PARTNER, OTHER_SHAPE
from rlprobe.said import Said, say

#: What records of different calls, layers and stages of one model have in common.
_SERIES = ["model", "rank", "of", "op", "direction", "slot", "index"]
#: Records of parameters: what one of a model's has, all of them have.
_OF_PARAMETERS = ["parameters", "grad", "grad_reduced", "grad_clipped", "change"]
#: A layer's or an expert's number within a module's name.
_NUMBER = r"(^|\.)\d+(\.|$)"


def check(step: Step) -> list[Said]:
    """What is lacking in each stage, and its first."""
    rows = [part for part in _of_stages(step) if part.height]
    if not rows:
        return []
    whole = pl.concat(rows)
    lacking = pl.col("because").is_in([NO_PARTNER, OTHER_SHAPE]).fill_null(False)
    some = (~lacking).any().over(_SERIES)
    found = whole.filter(lacking & some)
    return [
        say(
            "{stage}: {count:,} records are on one side only or of another shape, and those of "
            "other calls and layers are not, first {first}",
            stage=stage,
            count=part.height,
            first=part.item(0, "name"),
        )
        for (stage,), part in found.group_by("stage", maintain_order=True)
    ]


def _of_stages(step: Step) -> Iterator[pl.DataFrame]:
    """Records of training; none of a stage whose micro-batches or layers lie otherwise."""
    for name, finding in step.findings.items():
        stage = finding.stage
        if stage.misplaced is not None or stage.laid_out is not None:
            continue
        if name in stages.TRAINING_STAGES:
            yield stage.rows.filter(
                # how often a function runs is its caller's business
                pl.col("module").is_not_null() | (pl.col("slot") == "loss"),
                _is_of_no_choice() if any(p.near_ties for p in stage.processes) else True,
            ).select(
                "rank",
                "name",
                "direction",
                "slot",
                stage=pl.lit(name),
                model=pl.lit(stages.MODEL_ROLE.get(name)),
                of=_of_what(pl.coalesce("module", "name").str.replace_all(_NUMBER, "${1}#${2}")),
                op=_of_what("op"),
                index=_of_what("index"),
                because="unjudged_because",
            )


def _of_what(told: str | pl.Expr) -> pl.Expr:
    """What tells series apart; nothing for parameters, which no kernel has more or less of."""
    return pl.when(~pl.col("slot").is_in(_OF_PARAMETERS)).then(told)


def _is_of_no_choice() -> pl.Expr:
    """Not within experts, which have more tokens or none where a choice fell the other way."""
    return ~pl.col("name").str.contains("expert")
