"""Where a module's forward code makes something else of inputs that agree."""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose.cause import measure
from rlprobe.diagnose.cause.around import Scene, Symptoms, few_tokens
from rlprobe.diagnose.cause.differences import Record, slot
from rlprobe.diagnose.cause.hypotheses import experts, rounding
from rlprobe.judge import execution
from rlprobe.judge import origin as kinds
from rlprobe.said import Said, say


def symptoms(scene: Scene) -> Symptoms:
    """The record, and what its difference looks like."""
    record = Record.of(scene.finding, scene.row, inside=scene.is_inside, what=slot(scene.row))
    return Symptoms([record], described(scene))


def described(scene: Scene) -> list[Said]:
    """The difference in words, and of a router what it was given."""
    row = scene.row
    if not (row.get("error") or 0.0) > 0:
        return []
    said = measure.said(measure.of(row))
    like, rounded = rounding.like(row), rounding.rounded_to(row)
    if like is not None and rounded is None:
        said.append(
            say(
                "the error is as large as a rounding to {like} makes, and nothing shows "
                "that it is one",
                like=like,
            )
        )
    return said + few_tokens(scene) + _routed(scene)


def _routed(scene: Scene) -> list[Said]:
    """What a router or its experts were given, and whether it shows in what they make."""
    origin, row = scene.origin, scene.row
    operator = str(origin.operator or row.get("op"))
    if not experts.may_route(f"{operator} {(origin.module or '').rpartition('.')[2]}"):
        return []
    said = []
    if origin.kind == kinds.GLUE and _agrees(scene):
        said.append(
            say(
                "what {operator} hands to {module} differs, and its own output agrees: to "
                "no effect on it",
                operator=operator,
                module=row.get("module") or row.get("op"),
            )
        )
    if _was_given_choice(scene):
        said.append(
            say("the choice of experts that {operator} was given agrees", operator=operator)
        )
    return said


def _was_given_choice(scene: Scene) -> bool:
    """Whether the module was given a choice of experts, which agrees as its inputs do."""
    row, table = scene.row, scene.finding.stage.rows
    if "micro_batch" not in row or table.is_empty():
        return False
    given = table.filter(
        (pl.col("module") == pl.lit(scene.origin.module, pl.String))
        & (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "input")
    ).get_column("dtype_benchmark")
    return any(experts.is_choice(dtype) for dtype in given.to_list())


def _agrees(scene: Scene) -> bool:
    """Whether the enclosing module's own outputs agree although something inside differs."""
    row = scene.row
    own = scene.finding.stage.rows.filter(
        (pl.col("module") == pl.lit(scene.origin.module, pl.String))
        & (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("rank") == row.get("rank"))
        & (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "output")
        & pl.col("error").is_not_null()
    )
    return own.height > 0 and not own.get_column("beyond").any()
