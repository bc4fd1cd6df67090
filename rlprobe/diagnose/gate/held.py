"""Weights within a step: a model that nothing updates in between enters two stages with the same.

What came before does not matter here, so that every captured step can be asked: where a parameter
of the benchmark is the same on entering both stages and the target's is not, one of these stages
computed with weights that the model does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, opened, shut
from rlprobe.said import Said, listed, say
from rlprobe.store.read import Run

ITEM = "weights within a step"
#: What says which parameter of which process, and how it is laid out.
_PART = ["role", "rank", "name"]
_FORM = ["dtype", "local_shape", "offset"]


@dataclass(frozen=True)
class Other:
    """Parameters that a stage of the target has otherwise than another stage of the same step."""

    step: int
    rank: int
    #: The stage that computed with other weights, as far as it can be known, and the one it is
    #: held against.
    stage: str
    against: str
    names: list[str]
    #: Parameters held against each other in these two stages.
    compared: int
    #: The captured step whose weights these are, where they are those of an earlier one.
    older: int | None

    @property
    def said(self) -> Said:
        """Evidence in a sentence."""
        found = say(
            "in step {step}, {count} of {compared} parameters of the target are not the same on "
            "entering {stage} and {against}, as they are on the benchmark: {names}",
            step=self.step,
            count=len(self.names),
            compared=self.compared,
            stage=self.stage,
            against=self.against,
            names=listed(self.names),
        )
        if self.older is None:
            return found
        return found + say(
            "; {stage} has those of step {older}", stage=self.stage, older=self.older
        )


def check(evidence: Evidence) -> tuple[GateItem | None, Shut | None]:
    """Item ``weights within a step``; None where no model enters two stages of a step.

    Raises:
        StoreError: a table of weights is damaged.
    """
    sides = [_entered(run) for run in (evidence.benchmark, evidence.target)]
    if sides[0] is None or sides[1] is None:
        return None, None
    both = _pairs(sides[0]).join(
        _pairs(sides[1]), on=["step", *_PART, "stage", "reading", "next"], suffix="_target"
    )
    held = both.filter(pl.col("same"))
    if held.is_empty():
        return None, None
    wrong = held.filter(~pl.col("same_target"))
    if wrong.is_empty():
        return opened(
            ITEM,
            say(
                "{count} parameters are the same in every stage before their update",
                count=held.select(_PART).n_unique(),
            ),
        ), None
    found = _first(held, wrong, sides[1])
    module = {name.rpartition(".")[0] for name in found.names}
    action = say("see what changes this model's weights between the two stages, and back")
    values = {"parameter": found.names[0], "parameters that differ": 0}
    return shut(ITEM, found.said, action), Shut(
        "weights" if found.older is None else "stale_weights",
        "weights",
        found.stage,
        found.rank,
        module.pop() or None if len(module) == 1 else None,
        None,
        values,
        values | {"parameters that differ": len(found.names)},
        [found.said],
        found.step,
    )


def _entered(run: Run) -> pl.DataFrame | None:
    """Every reading of every parameter, in the order of steps, stages and their entries.

    A stage may be entered twice: with adapters that are on and off, or an update of two steps.
    """
    table = run.weights()
    if table is None:
        return None
    place = pl.col("stage").replace_strict(
        list(stages.STAGES), list(range(len(stages.STAGES))), default=99, return_dtype=pl.Int64
    )
    return (
        table.filter(pl.col("digest").is_not_null())
        .with_columns(place=place, reading=pl.int_range(pl.len()).over(["step", "stage", *_PART]))
        .sort("step", "place", "reading", maintain_order=True)
    )


def _pairs(entered: pl.DataFrame) -> pl.DataFrame:
    """Two stages of a step that follow each other in one model, parameter by parameter."""
    key = ["step", *_PART]
    following = {
        f"next_{name}": pl.col(name).shift(-1).over(key) for name in (*_FORM, "digest", "stage")
    }
    alike = pl.all_horizontal(pl.col(name).eq_missing(pl.col(f"next_{name}")) for name in _FORM)
    return (
        entered.with_columns(**following)
        # what is kept in another form is not the same bytes
        .filter(pl.col("next_stage").is_not_null() & alike)
        .select(
            *key,
            "stage",
            "reading",
            "place",
            "digest",
            "next_digest",
            next="next_stage",
            same=pl.col("digest") == pl.col("next_digest"),
        )
    )


def _first(held: pl.DataFrame, wrong: pl.DataFrame, entered: pl.DataFrame) -> Other:
    """The first two stages that differ, and which of them has what an earlier step had."""
    step, _, stage, following, rank = (
        wrong.select("step", "place", "stage", "next", "rank").sort("step", "place", "rank").row(0)
    )
    here = (pl.col("step") == step) & (pl.col("stage") == stage) & (pl.col("rank") == rank)
    rows = wrong.filter(here)
    role, name = rows.select("role", "name").row(0)
    same = (pl.col("role") == role) & (pl.col("rank") == rank) & (pl.col("name") == name)
    before = entered.filter(same & (pl.col("step") < step))
    steps = [
        before.filter(pl.col("digest") == rows.item(0, digest)).get_column("step").max()
        for digest in ("digest_target", "next_digest_target")
    ]
    # the stage with what an earlier step had; where neither has it, the first of the two
    late = steps[0] is None and steps[1] is not None
    older = steps[1] if late else steps[0]
    return Other(
        step=step,
        rank=rank,
        stage=following if late else stage,
        against=stage if late else following,
        names=rows.get_column("name").to_list(),
        compared=held.filter(here).height,
        older=older if isinstance(older, int) else None,
    )
