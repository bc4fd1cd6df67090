"""Later updates within a stage, on the weights that the updates before them left.

A stage that updates several times (mini-batches, epochs) goes on with weights that differ by what
the first update's change differs by, on two correct devices as well. To first order a relative
difference eta_m of parameter m's weights moves what runs on them by eta_m, as a rounding of these
weights would, and differences of different parameters have no common sign, so update k inherits ::

    H_k = sum over updates j < k of  sqrt(sum over m of eta_jm ** 2)
    eta_jm = min(observed, expected) * || change_m || / || weights_m ||

``observed`` is the measured relative difference of the change; where a stage's change was recorded
once, for all updates, that of the whole, which is no smaller. ``expected`` is what the measured
difference e of update j's gradient makes of an optimizer's step: 2 sqrt(e) by flipped signs, and
4 e besides (:mod:`rlprobe.judge.noise_updates`), so that a fault of the update itself, which moves
the change without the gradient, widens nothing. Activations and their gradients may then differ by
``SAFETY`` H more, parameters' gradients by twice that (weights act forward and backward) in the
measure of their own floor, which knows how their terms cancel.

A parameter that no module is called with by itself (of fused projections) has its norm from its
digest (:mod:`rlprobe.judge.held`). Where gradients, changes or weights were not recorded H is not
known, and nothing is judged.
"""

from __future__ import annotations

import itertools

import polars as pl

from rlprobe.judge import execution, held
from rlprobe.judge.excuse import Excuse
from rlprobe.judge.noise import SAFETY
from rlprobe.judge.noise_updates import ADAM_EPSILON, CHANGE, GRADIENTS
from rlprobe.judge.reasons import AS_CHANGES, INHERITED
from rlprobe.judge.roundoff import FP32, UNIT

_KEY = ["module", "index"]
#: A gradient's difference is known to this factor (a sketch's, to 9 %).
_SEEN = 1.5


def inherited(rows: pl.DataFrame) -> dict[int, float] | None:
    """H by update, from the second on; None where it is not known. Empty with one update.

    Args:
        rows: :func:`execution.timeline`'s, with floors, of one process.
    """
    late = rows.filter(~pl.col("before_update"))
    if late.is_empty():
        return {}
    update = pl.col("direction") == "update"
    gradients = (
        rows.filter(pl.col("slot").is_in(GRADIENTS) & update & pl.col("error").is_not_null())
        .group_by(*_KEY, "call", maintain_order=True)
        .last()
        .select(
            *_KEY, "call", gradient="error", gradient_norm="norm_benchmark",
            size=pl.coalesce("shape_benchmark", "shape_target").list.eval(
                pl.element().cast(pl.Float64).product()
            ).list.first().fill_null(1.0),
        )
    )  # fmt: skip
    weights = (
        rows.filter((pl.col("slot") == "parameters") & (pl.col("direction") == "forward"))
        .group_by(_KEY, maintain_order=True)
        .agg(weight=pl.col("norm_benchmark").first())
    )
    changes = rows.filter((pl.col("slot") == CHANGE) & (pl.col("norm_benchmark") > 0)).select(
        *_KEY, "call", "error", "error_kind", change="norm_benchmark",
        held=pl.col(held.COLUMN) if held.COLUMN in rows.columns else pl.lit(None, pl.Float64),
    )  # fmt: skip
    calls = sorted(gradients.get_column("call").unique().to_list())
    if len(calls) < 2 or changes.is_empty():
        return None
    each = changes.get_column("call").n_unique() > 1
    if not each:
        changes = changes.drop("call")
    joined = gradients.join(changes, on=[*_KEY, "call"] if each else _KEY, nulls_equal=True).join(
        weights, on=_KEY, how="left", nulls_equal=True
    )
    joined = joined.with_columns(weight=pl.coalesce("weight", "held"))
    if joined.height < gradients.height or joined.get_column("weight").null_count():
        return None
    near = (10 * ADAM_EPSILON * pl.col("size").sqrt() / pl.col("gradient_norm")).clip(0, 1)
    moved = _SEEN * pl.col("gradient") + 4 * FP32
    expected = (4 * (moved + near.fill_nan(1.0)) + (4 * moved).pow(2)).sqrt()
    exact = pl.col("error_kind").is_in(["tensor", "digest", "sketch"])
    observed = pl.when(exact).then(pl.col("error")).otherwise(float("inf"))
    eta = pl.min_horizontal(expected, observed.fill_null(float("inf"))) * pl.col("change")
    by_update = dict(
        joined.group_by("call")
        .agg((eta / pl.col("weight")).filter(pl.col("weight") > 0).pow(2).sum().sqrt())
        .iter_rows()
    )
    found, total = {}, 0.0
    for before, call in itertools.pairwise(calls):
        total += float(by_update[before])
        found[int(call)] = total
    return found


def excuses(rows: pl.DataFrame, inherited: dict[int, float]) -> list[Excuse]:
    """Wider floors for what ran after each update but the last.

    Args:
        rows: one process's, of :func:`rlprobe.judge.excuse.begin`.
        inherited: of :func:`inherited`.
    """
    late = rows.filter(~pl.col("before_update") & (pl.col("phase") < execution.GRADIENTS))
    first = late.get_column("micro_batch").min()
    if not inherited or not isinstance(first, int):
        return []
    # What they differ by is judged where it was made: as changes.
    given = [Excuse(AS_CHANGES, ~pl.col("before_update") & (pl.col("slot") == "parameters"))]
    for call, moved in inherited.items():
        wide = SAFETY * moved
        passes = pl.col("micro_batch").is_between(first * call, first * (call + 1) - 1)
        floats = pl.col("dtype_benchmark").is_in(list(UNIT))
        moving = passes & (pl.col("phase") < execution.GRADIENTS) & floats
        own = rows.filter(moving & (pl.col("phase") == execution.BACKWARD) & (pl.col("floor") > 0))
        typical = own.get_column("floor").median()
        times = 1 + 2 * wide / typical if isinstance(typical, float) else float("inf")
        after = (pl.col("phase") >= execution.GRADIENTS) & (pl.col("call") == call)
        given += [
            Excuse(INHERITED, moving & (pl.col("slot") != "grad"), pl.col("floor") + wide),
            Excuse(INHERITED, moving & (pl.col("slot") == "grad"), pl.col("floor") * times),
            Excuse(INHERITED, after, pl.col("floor") * times),
        ]
    return given
