"""What a stage hands on, measured against what may be left of differences before it."""

from __future__ import annotations

import dataclasses

import polars as pl

from rlprobe import stages
from rlprobe.judge import execution, keydata
from rlprobe.judge import row as judged_rows
from rlprobe.judge.keydata import Difference
from rlprobe.judge.noise import SAFETY
from rlprobe.judge.outcomes import ALL_VALUES, OTHER_FORMAT, Outcome, nearer, tail
from rlprobe.judge.roundoff import ELEMENTARY, FP32, UNIT
from rlprobe.judge.stage import Stage

#: What an elementwise computation in fp32 may differ by, of numbers that are equal.
_LAST = SAFETY * ELEMENTARY**0.5 * FP32


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


def row_of(outcome: Outcome) -> judged_rows.Row:
    """A result as the row of an origin."""
    return {"name": outcome.name, "error": outcome.error, "floor": outcome.floor,
            "excess": outcome.excess, "slot": "output",
            "error_kind": None if outcome.measure == ALL_VALUES else outcome.measure}  # fmt: skip


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
