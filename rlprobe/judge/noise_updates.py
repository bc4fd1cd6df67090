"""Round-off bounds of losses, parameter gradients and the optimizer's changes.

**Losses** are means of terms of order one (ratios, advantages, log-probabilities) that cancel: a
policy loss on its own data is a mean of whitened advantages, near 0. Their round-off is relative
to the terms, not to the mean, so the bound is absolute: that of depth times max(1, |loss|), and
what the data that the stage was given account for.

**Gradients** of a parameter continue the chain with a sum over the tokens and over the
micro-batches. Where terms cancel (a bias of keys, which softmax ignores), the error keeps the size
of the terms while the sum shrinks; the factor is the norm of the terms, known from the gradients at
the module's output (and its input), over the norm of the sum.

**Changes.** A linear optimizer (SGD) passes the gradient's relative error on. Adam does not: its
step is lr g / (|g| + eps) at first, close to a sign, so an element whose gradient is smaller than
the gradient's error may flip, which changes it by 2 lr whatever the error was. With relative error
e, n elements and a density of the standardised gradient near 0 below one, n e elements are expected
to: relative L2 about 2 sqrt(e), and no fixed threshold bounds both a bias and a matrix. So the
bound is 2 sqrt(k / n) with k the number of flips exceeded with probability ``FLIP_TAIL``
(Poisson). Flips leave the *norm* of a change alone, so that is bounded as well, linearly; a wrong
learning rate is seen there long before it outgrows the flips. So is what remains of the difference
when the few buckets of a sketch that flips touch are left out (``dense_model``). All add the
rounding of the new value: u |w| / |change|, with the u of the format that weights are kept in where
that is coarser than what gradients are computed in (:mod:`rlprobe.judge.kept`). Whether an
optimizer is linear is read off the records: it multiplies all gradients by one number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from rlprobe.judge import roundoff

GRADIENTS = ("grad", "grad_reduced", "grad_clipped")
CHANGE, LOSS = "change", "loss"
#: Chance per parameter that more elements flip than the bound allows.
FLIP_TAIL = 1e-5
#: Adam's usual epsilon; elements with gradients near it are neither signs nor linear.
ADAM_EPSILON = 1e-8
#: Flips that a median over the 61 buckets of a sketch does not feel.
_FEW = 15
#: Spread of log(change / gradient) over parameters below which the optimizer is linear.
_LINEAR_SPREAD = 0.05


def extend(table: pl.DataFrame, safety: float) -> pl.DataFrame:
    """Add ``model`` (the bound on the relative L2 error), ``norm_model`` (on the norm's) and
    ``dense_model`` (on what a change differs by besides flips; null for other records).

    ``table``: one process's rows in order with ``S``, ``u``, ``same``, ``micro_batch`` of
    :mod:`rlprobe.judge.noise`.
    """
    table = table.with_columns(
        model=safety * pl.col("S").sqrt(),
        norm_model=pl.lit(None, pl.Float64),
        dense_model=pl.lit(None, pl.Float64),
    )
    table = _losses(table, safety)
    if not table.get_column("direction").eq("update").any() and not _has_gradients(table):
        return table
    return _changes(_gradients(table, safety))


def _has_gradients(table: pl.DataFrame) -> bool:
    return bool(table.get_column("slot").is_in(GRADIENTS).any())


def _deepest(table: pl.DataFrame, *directions: str) -> float:
    found = table.select(pl.col("S").filter(pl.col("direction").is_in(directions)).max()).item()
    return float(found) if isinstance(found, float) else 0.0


def _losses(table: pl.DataFrame, safety: float) -> pl.DataFrame:
    depth = _deepest(table, "forward")
    loss = pl.col("slot") == LOSS
    b, t = (
        pl.coalesce(f"max_{side}", pl.col(f"value_{side}").cast(pl.Float64, strict=False)).abs()
        for side in ("benchmark", "target")
    )
    own = (depth + roundoff.ELEMENTARY * pl.col("u").pow(2)).sqrt()
    # The error is relative to the benchmark, or to the target where that is 0.
    scale = pl.when(b > 0).then(b).otherwise(t)
    absolute = safety * own * pl.max_horizontal(b, t, pl.lit(1.0)) + pl.col("inherited")
    relative = absolute / scale
    return table.with_columns(
        model=pl.when(loss).then(relative.fill_nan(0.0)).otherwise(pl.col("model"))
    )


def _gradients(table: pl.DataFrame, safety: float) -> pl.DataFrame:
    """Bounds of parameter gradients: the deepest pass, a sum over tokens, cancellation."""
    depth = _deepest(table, "forward", "backward")
    shape = pl.coalesce("shape_benchmark", "shape_target")
    outputs = table.filter((pl.col("direction") == "backward") & (pl.col("slot") == "input"))
    tokens = outputs.select((pl.col("size") / shape.list.last()).max()).item()
    passes = max(table.get_column("micro_batch").to_list(), default=1) or 1
    terms = pl.lit(float(tokens or 0) + passes)
    gradient = pl.col("slot").is_in(GRADIENTS)
    # Kept in a wider format than they are computed in: that of what arrives at their module.
    known = outputs.filter(pl.col("module").is_not_null())
    arrived = known.group_by("module").agg(arrived=pl.col("u").max())
    table = _cancellation(table).join(arrived, on="module", how="left", maintain_order="left")
    u = pl.max_horizontal("u", "arrived")
    own = depth + roundoff.variance(u, terms) + passes * u.pow(2)
    return table.with_columns(
        model=pl.when(gradient & ~pl.col("same"))
        .then(safety * own.sqrt() * pl.col("cancellation"))
        .when(gradient)
        .then(safety * (roundoff.ELEMENTARY**0.5) * pl.col("u"))
        .otherwise(pl.col("model"))
    ).drop("arrived")


def _cancellation(table: pl.DataFrame) -> pl.DataFrame:
    """``cancellation``: norm of a gradient's terms over the norm of their sum, at least 1."""
    shape = pl.coalesce("shape_benchmark", "shape_target")
    rows = pl.col("size") / shape.list.last()
    first = pl.col("index").is_in(["0", "input"]) | (pl.col("index") == "hidden_states")
    backward = table.filter(
        (pl.col("direction") == "backward")
        & (pl.col("slot") == "input")
        & first
        & pl.col("module").is_not_null()
    ).select("module", "call", flow=pl.col("norm_benchmark"), tokens=rows)
    forward = table.filter(
        (pl.col("direction") == "forward")
        & (pl.col("slot") == "input")
        & first
        & pl.col("module").is_not_null()
    ).select("module", "call", held=pl.col("norm_benchmark"))
    terms = (
        backward.join(forward, on=["module", "call"], how="left", nulls_equal=True)
        .group_by("module")
        .agg(
            vectors=pl.col("flow").pow(2).sum().sqrt(),
            products=(pl.col("flow") * pl.col("held")).pow(2).truediv("tokens").sum().sqrt(),
        )
    )
    table = table.join(terms, on="module", how="left", maintain_order="left")
    matrix = shape.list.len() >= 2
    size = pl.when(matrix).then(pl.col("products")).otherwise(pl.col("vectors"))
    # Clipping scales all gradients alike; the unclipped ones say how terms cancel.
    unclipped = (
        pl.col("norm_benchmark")
        .filter(pl.col("slot") == GRADIENTS[0])
        .first()
        .over("module", "index")
    )
    ratio = size / pl.coalesce(unclipped, pl.col("norm_benchmark"))
    return table.with_columns(
        cancellation=pl.when(ratio.is_finite() & (ratio > 1)).then(ratio).otherwise(1.0)
    ).drop("vectors", "products")


def _changes(table: pl.DataFrame) -> pl.DataFrame:
    changes = table.filter(pl.col("slot") == CHANGE)
    if changes.is_empty():
        return table
    gradients = table.filter(pl.col("slot").is_in(GRADIENTS) & (pl.col("direction") == "update"))
    # Where a stage updates several times and its change is recorded once, all updates made it.
    single = changes.get_column("call").n_unique() < gradients.get_column("call").n_unique()
    key = ["module", "index"] if single else ["module", "index", "call"]
    # The last gradient before the optimizer is the one it used.
    each = gradients.group_by("module", "index", "call", maintain_order=True).last()
    used = each.group_by(key, maintain_order=True).agg(
        gradient_norm=pl.col("norm_benchmark").min(),
        gradient_error=pl.col("error").max(),
        gradient_kind=pl.col("error_kind").last(),
        gradient_noise=pl.col("model").max(),
        gradient_same=pl.col("same").all(),
        gradient_u=pl.col("u").max(),
        updates=pl.len(),
    )
    weights = (
        table.filter((pl.col("slot") == "parameters") & (pl.col("direction") == "forward"))
        .group_by("module", "index", maintain_order=True)
        .agg(weight=pl.col("norm_benchmark").first())
    )
    joined = (
        changes.select(
            "_row", *key, "norm_benchmark", "size", "rounding", "held", vector=_is_vector()
        )
        .join(used, on=key, how="left", maintain_order="left", nulls_equal=True)
        .join(weights, on=["module", "index"], how="left", maintain_order="left", nulls_equal=True)
        .with_columns(weight=pl.coalesce("weight", "held"))
    )
    bounds = _change_bounds(joined, _is_linear(joined))
    return (
        table.join(bounds, on="_row", how="left", maintain_order="left")
        .with_columns(
            model=pl.coalesce("change_model", "model"),
            norm_model=pl.coalesce("change_norm", "norm_model"),
            dense_model=pl.coalesce("change_dense", "dense_model"),
        )
        .drop("change_model", "change_norm", "change_dense")
    )


def _is_vector() -> pl.Expr:
    return pl.coalesce("shape_benchmark", "shape_target").list.len() <= 1


def _is_linear(changes: pl.DataFrame) -> bool:
    """Whether every change is the gradient times one number (SGD without momentum)."""
    ratio = changes.select(
        (pl.col("norm_benchmark") / pl.col("gradient_norm")).log().alias("r")
    ).filter(pl.col("r").is_finite())
    spread = ratio.get_column("r").std()
    return ratio.height > 1 and isinstance(spread, float) and spread < _LINEAR_SPREAD


def _change_bounds(changes: pl.DataFrame, linear: bool) -> pl.DataFrame:
    """``_row``, ``change_model``, ``change_norm``, ``change_dense``."""
    columns = {
        name: changes.get_column(name).cast(pl.Float64).to_numpy()
        for name in (
            "norm_benchmark",
            "size",
            "gradient_norm",
            "gradient_error",
            "gradient_noise",
            "weight",
            "gradient_u",
            "updates",
            "rounding",
        )
    }
    norm, size = columns["norm_benchmark"], columns["size"]
    columns["updates"] = np.nan_to_num(columns["updates"], nan=1.0)
    exact = changes.get_column("gradient_kind").is_in(["tensor", "digest", "sketch"])
    same = changes.get_column("gradient_same").fill_null(False).to_numpy()
    # What the gradients were seen to differ by explains the flips; statistics see too little.
    error = np.where(
        exact.fill_null(False).to_numpy() & np.isfinite(columns["gradient_error"]),
        1.5 * columns["gradient_error"],
        columns["gradient_noise"],
    )
    error = np.where(np.isfinite(error), error, roundoff.FP32)
    u = np.where(np.isfinite(columns["gradient_u"]), columns["gradient_u"], roundoff.FP32)
    error = np.where(same, 0.0, error) + 4.0 * u
    with np.errstate(divide="ignore", invalid="ignore"):
        stored = np.where(columns["weight"] > 0, 2.0 * u * columns["weight"] / norm, 0.0)
        rounded = np.nan_to_num(columns["rounding"] * columns["updates"] / norm)
        deviation = columns["gradient_norm"] / np.sqrt(size)
        near = np.where(deviation > 0, 10.0 * ADAM_EPSILON / deviation, 1.0)
    stored = np.maximum(np.where(np.isfinite(stored), stored, 0.0), rounded)
    near = np.where(np.isfinite(near), np.minimum(near, 1.0), 0.0)
    if linear:
        model = error + stored
        norms = dense = model
    else:
        chance = size * (error + near) * columns["updates"]
        flips = np.where(same, 0.0, poisson_quantile(chance, FLIP_TAIL))
        flips = np.minimum(flips, size)
        # Of a bias a part may cancel in full (a key's, which no probability depends on): its signs
        # are as uncertain as the bound says, whatever the whole was seen to differ by.
        doubtful = np.where(same, 0.0, np.fmax(error, columns["gradient_noise"]))
        most = poisson_quantile(size * (doubtful + near) * columns["updates"], FLIP_TAIL)
        vector = changes.get_column("vector").fill_null(False).to_numpy()
        most = np.where(vector & ~same, np.minimum(most, size), flips)
        model = np.sqrt(4.0 * most / size + (4.0 * error) ** 2 + stored**2)
        norms = 4.0 * error + stored + flips / size
        # Few flips leave most of a sketch's buckets alone; many look dense.
        dense = np.where(flips > _FEW, model, 4.0 * error + stored)
    return pl.DataFrame(
        {
            "_row": changes.get_column("_row"),
            "change_model": np.minimum(model, 2.0),
            "change_norm": np.minimum(norms, 2.0),
            "change_dense": np.minimum(dense, 2.0),
        }
    ).with_columns(pl.col("change_model", "change_norm", "change_dense").fill_nan(None))


def poisson_quantile(mean: npt.ArrayLike, tail: float) -> npt.NDArray[np.float64]:
    """The smallest k with P(X > k) <= ``tail`` for X ~ Poisson(``mean``), elementwise.

    Exact below a mean of 50; above, the bound of Chernoff, P(X > m + t) <= exp(-t**2 / (2 (m + t /
    3))), which is at most a few per cent too large.
    """
    means = np.atleast_1d(np.asarray(mean, dtype=np.float64))
    means = np.where(np.isfinite(means), np.maximum(means, 0.0), 0.0)
    log_tail = -np.log(tail)
    t = log_tail / 3.0 + np.sqrt((log_tail / 3.0) ** 2 + 2.0 * log_tail * means)
    result = np.ceil(means + t)
    small = means < 50.0
    remaining = means[small]
    k = np.zeros(remaining.size)
    term = np.exp(-remaining)
    beyond = -np.expm1(-remaining)
    todo = beyond > tail
    for step in range(1, 200):
        if not todo.any():
            break
        term = term * remaining / step
        beyond = beyond - term
        k = np.where(todo, step, k)
        todo = todo & (beyond > tail)
    result[small] = k
    return np.asarray(result, dtype=np.float64)
