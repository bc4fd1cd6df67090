"""Where a stage's numbers part first: origin, as against inherited.

Records are walked in execution order. The first one beyond its floor has, by that order, inputs
that agree. Which code made it?

- an **output**: the module itself (a parent's own code after its last child, if it is a parent);
- an **input**: no module that was recorded made it, so the code between modules did: that of the
  innermost module that encloses it and whose own inputs agree;
- a **gradient** that arrives at a module: likewise, backward; the very first of a backward pass
  comes from the loss;
- a gradient that a module passes on, or of its parameters: the module; so it is where one side
  passes none on, and what arrives behind it lacks a part;
- a **loss**: the loss, when all forward records agree;
- gradients after reduction or clipping, changes of parameters: the reduction, the clipping, the
  optimizer.

Parameters are the gate's business: records of weights never make a module the origin.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe.judge import execution, supplied
from rlprobe.judge.execution import Call
from rlprobe.judge.row import Row, first
from rlprobe.said import Said, of_side, say

#: Kinds of origin.
MODULE, GLUE, STAGE_INPUT, LOSS, WEIGHT_GRADIENT, ACCUMULATION = (
    "module",
    "glue",
    "input",
    "loss",
    "weight_gradient",
    "accumulation",
)
#: A module through which one side alone passes a gradient back.
CUT = "cut"
REDUCTION, CLIPPING, OPTIMIZER, WEIGHTS = "reduction", "clipping", "optimizer", "weights"
#: What a reduction is called where gradients part that several processes reduce.
REDUCTION_OVER_RANKS = "gradient reduction"
#: What an optimizer was told, whether or not what it made of it is beyond a floor.
SETTING = "setting"
#: What a module keeps beside its parameters (:mod:`rlprobe.judge.buffers`), likewise.
BUFFER = "buffer"
#: More than this share of parameter gradients differing, activations' agreeing, is no module's.
_MOST = 0.5


@dataclass(frozen=True)
class Origin:
    """The first divergence within a stage."""

    kind: str
    module: str | None
    operator: str | None
    #: The record, a row of the stage's table.
    row: Row
    #: What is said about how it was found.
    reason: Said


def find(rows: pl.DataFrame, calls: list[Call]) -> Origin | None:
    """The origin in one process's rows of a stage, None where nothing judged is beyond.

    Args:
        rows: :func:`execution.timeline`'s rows with ``beyond`` of :mod:`floors`.
        calls: their calls.
    """
    candidates = rows.filter(pl.col("judged") & pl.col("beyond") & (pl.col("slot") != "parameters"))
    if "update" in candidates.columns:  # an update's gradients come before the next one's passes
        candidates = candidates.sort("update", maintain_order=True)
    row = first(candidates)
    if row is None:
        return None
    return _left_by_optimizer(row, rows) or _explain(row, rows, calls)


#: Outputs that differ by so much more than before an update have other weights.
_MOVED = 10.0


def _left_by_optimizer(row: Row, rows: pl.DataFrame) -> Origin | None:
    """The optimizer, where what uses the weights it left differs from the first module on.

    A fault of a module leaves the modules before it as they were in the update before.
    """
    if not row.get("update") or row["phase"] != execution.FORWARD:
        return None
    weighted = rows.filter(pl.col("slot") == "parameters").get_column("module").unique()
    outputs = rows.filter(
        (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "output")
        & pl.col("module").is_in(weighted.implode())
    )
    earlier = outputs.filter(
        (pl.col("micro_batch") == row["micro_batch"]) & (pl.col("sequence") < row["sequence"])
    )
    before = (
        outputs.filter(pl.col("update") == row["update"] - 1)
        .group_by("module", "index")
        .agg(before=pl.col("error").max())
    )
    times = earlier.join(before, on=["module", "index"]).select(pl.col("error") / pl.col("before"))
    typical = times.get_column("error").median()
    if not earlier.is_empty() and not (isinstance(typical, float) and typical > _MOVED):
        return None
    return Origin(
        OPTIMIZER,
        None,
        "optimizer",
        row,
        say(
            "all gradients agree within noise up to update {update} of the stage, and "
            "what runs on the weights it left does not, from the first module on",
            update=row["update"],
        ),
    )


def received(found: Origin) -> bool:
    """Whether a process was given what differs, rather than making it: activations or gradients."""
    sent_back = found.kind == LOSS and found.row["phase"] == execution.BACKWARD
    return found.kind == STAGE_INPUT or sent_back


def _explain(row: Row, rows: pl.DataFrame, calls: list[Call]) -> Origin:
    phase, slot = row["phase"], row["slot"]
    if phase == execution.CHANGES:
        alone = _alone(row, rows, by=_BY_FAR)
        if alone is not None:
            return Origin(
                OPTIMIZER,
                alone,
                "optimizer",
                row,
                say(
                    "all gradients agree within noise, and of all parameters only those of {alone} "
                    "changed otherwise",
                    alone=alone,
                ),
            )
        return Origin(
            OPTIMIZER,
            None,
            "optimizer",
            row,
            say("all gradients agree within noise and the changes of parameters do not"),
        )
    if phase == execution.GRADIENTS:
        return _gradient(row, rows)
    if phase == execution.LOSS:
        return Origin(
            LOSS,
            None,
            "loss",
            row,
            say("all forward records agree within noise and the loss does not"),
        )
    if slot == "grad":
        return _weight_gradient(row, rows)
    if phase == execution.BACKWARD:
        return _backward(row, rows, calls)
    return _forward(row, rows, calls)


def _forward(row: Row, rows: pl.DataFrame, calls: list[Call]) -> Origin:
    if row["slot"] == "output":
        if row["module"] is None and (row["op"] or "").startswith("save."):
            return Origin(LOSS, None, row["op"], row, say("what the stage saved differs"))
        return Origin(
            MODULE,
            _module(row),
            row["op"],
            row,
            supplied.agreeing(row, rows),
        )
    owner = _encloses(row["call_id"], calls)
    if owner is None:
        where = say(
            "input {index} of {module} differs",
            index=row["index"] or row["slot"],
            module=row["module"] or row["op"],
        )
        early = _is_early(row, rows)
        why = (
            say("before any module ran") if early else say("although every output before it agrees")
        )
        return Origin(STAGE_INPUT, None, row["op"], row, say("{where} {why}", where=where, why=why))
    call = calls[owner]
    parameter = supplied.differing_parameter(call.module, rows)
    whose = (
        say("the code of {owner} itself", owner=call.module)
        if parameter is None
        else say("{parameter} differs too: other weights, not other code", parameter=parameter)
    )
    return Origin(
        GLUE,
        call.module,
        call.operator,
        row,
        say(
            "input {index} of {module} differs although every output before it and the "
            "inputs of {owner} agree: {whose}",
            index=row["index"] or row["slot"],
            module=row["module"] or row["op"],
            owner=call.module,
            whose=whose,
        ),
    )


def _module(row: Row) -> str | None:
    """The module that made a record: the one of that name, or whose call a function ran in."""
    return row["module"] or row.get("within")


def _is_early(row: Row, rows: pl.DataFrame) -> bool:
    earlier = rows.filter(
        (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("sequence") < row["sequence"])
        & (pl.col("slot") == "output")
        & (pl.col("phase") == execution.FORWARD)
    )
    return earlier.is_empty()


def _encloses(call_id: int, calls: list[Call]) -> int | None:
    """The innermost recorded call around a call; its inputs came before, so they agree.

    By nesting, else by path: a parent's gradients may be complete before its children's are.
    """
    own = calls[call_id]
    if own.parent is not None or own.module is None:
        return own.parent
    around = [
        (len(call.module), index)
        for index, call in enumerate(calls)
        if call.direction == own.direction
        and call.micro_batch == own.micro_batch
        and call.module
        and own.module.startswith(f"{call.module}.")
    ]
    return max(around)[1] if around else None


def _backward(row: Row, rows: pl.DataFrame, calls: list[Call]) -> Origin:
    if row["slot"] == "output":
        return Origin(
            MODULE,
            _module(row),
            row["op"],
            row,
            say("the gradient at its output agrees within noise and the one it passes on does not"),
        )
    earlier = rows.filter(
        (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("phase") == execution.BACKWARD)
        & (pl.col("sequence") < row["sequence"])
        & pl.col("error").is_not_null()
    )
    if earlier.filter(pl.col("call_id") != row["call_id"]).is_empty():
        return Origin(
            LOSS,
            None,
            "loss",
            row,
            say(
                "all forward records agree within noise; the first gradient that the loss "
                "sends back does not"
            ),
        )
    owner = _encloses(row["call_id"], calls)
    if owner is not None:
        call = calls[owner]
        cut = _cut(row, rows, call.module or "")
        if cut is not None:
            return cut
        return Origin(
            GLUE,
            call.module,
            call.operator,
            row,
            say(
                "the gradient at the output of {module} differs although those behind it "
                "agree: the backward code of {owner} itself",
                module=row["module"],
                owner=call.module,
            ),
        )
    return Origin(
        GLUE,
        None,
        row["op"],
        row,
        say(
            "the gradient at the output of {module} differs although those behind it "
            "agree; no recorded module encloses it",
            module=row["module"],
        ),
    )


def _cut(row: Row, rows: pl.DataFrame, owner: str) -> Origin | None:
    """The outermost module within a block that is given a gradient and on one side passes none on.

    Args:
        row: the first gradient behind it that differs.
        rows: of the process.
        owner: the block, whose own code would be the origin else.
    """
    ran = rows.filter(
        (pl.col("micro_batch") == row["micro_batch"])
        & (pl.col("phase") == execution.BACKWARD)
        & (pl.col("sequence") < row["sequence"])
        & pl.col("module").str.starts_with(f"{owner}.")
    )
    given = ran.filter((pl.col("slot") == "input") & pl.col("judged") & ~pl.col("beyond"))
    lone = pl.col("dtype_benchmark").is_null() != pl.col("dtype_target").is_null()
    cut = ran.filter(
        (pl.col("slot") == "output")
        & lone
        & pl.col("module").is_in(given.get_column("module").implode())
    )
    found = first(cut.sort(pl.col("module").str.len_chars(), "sequence"))
    if found is None:
        return None
    passes = "benchmark" if found["dtype_target"] is None else "target"
    return Origin(
        CUT,
        found["module"],
        found["op"],
        row,
        say(
            "{module} is given the same gradient on both sides, and on the {side} alone passes "
            "one on: the other cuts it off",
            module=found["module"],
            side=of_side(passes),
        ),
    )


def _weight_gradient(row: Row, rows: pl.DataFrame) -> Origin:
    same_pass = rows.filter(
        (pl.col("micro_batch") == row["micro_batch"]) & (pl.col("phase") == execution.BACKWARD)
    )
    weights = same_pass.filter(pl.col("slot") == "grad")
    flows = same_pass.filter((pl.col("slot") != "grad") & pl.col("beyond"))
    share = weights.get_column("beyond").mean()
    if flows.is_empty() and isinstance(share, float) and share > _MOST and weights.height > 2:
        return Origin(
            ACCUMULATION,
            None,
            "gradient accumulation",
            row,
            say(
                "{share:.0%} of the parameter gradients differ in micro-batch "
                "{micro_batch} although all gradients of activations agree",
                share=share,
                micro_batch=row["micro_batch"],
            ),
        )
    return Origin(
        WEIGHT_GRADIENT,
        row["module"],
        row["op"],
        row,
        say(
            "the gradient at its output agrees within noise and that of its parameter "
            "{index} does not",
            index=row["index"],
        ),
    )


def _gradient(row: Row, rows: pl.DataFrame) -> Origin:
    if row["slot"] == "grad_clipped":
        return Origin(
            CLIPPING,
            None,
            "clip_grad_norm",
            row,
            say("gradients agree within noise before clipping and not after"),
        )
    before = (
        say("gradients of activations agree within noise")
        if has_activations(rows)
        else say("activations and their gradients were not judged")
    )
    alone = _alone(row, rows)
    if alone is not None:
        return Origin(
            REDUCTION,
            alone,
            "gradient",
            row,
            say(
                "{before}, and of all parameters' accumulated gradients only those of "
                "{alone} differ",
                before=before,
                alone=alone,
            ),
        )
    return Origin(
        REDUCTION,
        None,
        # what made them is not known where nothing was judged that ran before
        REDUCTION_OVER_RANKS if has_activations(rows) else "gradients",
        row,
        say("{before}, and the parameters' accumulated or reduced gradients differ", before=before),
    )


def has_activations(rows: pl.DataFrame) -> bool:
    """Whether anything was judged that ran before the gradients were complete."""
    held = pl.col("judged") & (pl.col("phase") < execution.GRADIENTS)
    return bool(rows.select(held.any()).item())


#: Modules with gradients below which one that differs alone says nothing.
_FEW = 4
#: An optimizer's setting shows in one module first, where it is just beyond the floor: one that has
#: a fault of its own is this many times further out than any other.
_BY_FAR = 2.0


def _alone(row: Row, rows: pl.DataFrame, by: float = 1.0) -> str | None:
    """The only module whose gradients or changes differ at this point, where there are others.

    Args:
        row: one of these records.
        rows: of its process.
        by: how many times further beyond its floor it is than any other module's at the least.
    """
    same = rows.filter(
        pl.col("judged")
        & (pl.col("slot") == row["slot"])
        & (pl.col("micro_batch") == row["micro_batch"])
        & pl.col("module").is_not_null()
    )
    wrong = same.filter(pl.col("beyond")).get_column("module").unique().to_list()
    if len(wrong) != 1 or same["module"].n_unique() < _FEW:
        return None
    if by == 1.0:
        return str(wrong[0])
    mine = pl.col("module") == wrong[0]
    others = same.filter(~mine & (pl.col("excess") * by > _furthest(same.filter(mine))))
    return str(wrong[0]) if others.is_empty() else None


def _furthest(rows: pl.DataFrame) -> float:
    found = rows.get_column("excess").max()
    return float(found) if isinstance(found, (int, float)) else 0.0
