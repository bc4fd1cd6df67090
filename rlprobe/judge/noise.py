"""The round-off bound of every record: how far two correct devices may be apart.

The model. A record is the result of a chain of operations. Each adds a relative error of random
sign (:func:`rlprobe.judge.roundoff.variance`); variances add up along the chain, in execution
order, forward and on through backward. So with S the sum of the variances of everything that ran
before it in the same pass over the model, ::

    noise = SAFETY * sqrt(S)

bounds the relative L2 difference. What goes into S is read off the records: dtypes (of the coarser
side), the depth (operations before it), and reduction lengths (shapes of weights and activations).
Nothing is a fixed percentage, and what is bitwise equal on both sides adds nothing, so that the
bound starts where rounding does.

Parameter gradients, their changes by the optimizer and losses need more than depth: see
:mod:`rlprobe.judge.noise_updates`. Integers, booleans and texts have no round-off: any difference
is one.

**How often it alarms.** docs/diagnosis.md has what ``python -m benchmarks.benign`` measured (other
kernels, four architectures, fp32 and bf16). ``SAFETY`` was set before, on 26 pairs of runs of
small transformers (2 to 8 layers, 64 to 256 wide), 13,000 records, of which the nearest was at 0.36
of its bound forward and backward, and at 0.64 among parameter changes in bf16.
The bound is about round-off alone: a device that rounds its factors first (TF32, HF32) needs that
said (``products``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from rlprobe import sketch_floors
from rlprobe.compare.match import pairs
from rlprobe.judge import layers, noise_updates, roundoff

#: Multiple of the expected growth below which a difference is round-off.
SAFETY = 4.0
#: Two devices' max, min, mean and norm of one tensor agree to this many round-offs.
STATISTICS_RESOLUTION = 8.0
#: Chance that more of something rare happens than is allowed for (experts at near ties).
FALSE_ALARM_RATE = 1e-3

_FORWARD, _BACKWARD, _UPDATE = "forward", "backward", "update"
_PROCESS = ("step", "rank")
_SIDES = ("benchmark", "target")
#: Columns of a comparison that the bounds follow from.
_NEEDED = [
    *_PROCESS, "order", "name", "module", "op", "call", "direction", "slot", "index",
    *(f"{name}_{side}" for name in ("dtype", "shape", "max", "min", "value") for side in _SIDES),
    "norm_benchmark", "max_diff", "min_diff", "mean_diff", "norm_diff", "error", "error_kind",
]  # fmt: skip


#: Modules that make the table of sines and cosines that positions turn queries and keys by.
_ROTARY = "Rotary[A-Za-z]*Embedding$"
#: What the sines of a table differ by, in roundings of the largest angle: frequencies fall off
#: geometrically, so that only the first few angles are large, and positions are a third as large in
#: the mean of squares.
_ANGLES = 0.25
#: Roundings of the largest angle by which a sine or cosine in fp32 may be off, with room for what
#: devices make of either: 64 are 8 times what is expected of the table's norm.
_TIPPED = 64.0
#: Relative difference of unrelated values, about.
_UNRELATED = 2.0
#: Parts of a bound by which norms may differ: what many elements have in common, and what chance
#: makes of n elements, times 1 / sqrt(n). Of 55,000 records of 82 pairs of correct devices the one
#: that needs most of it needs three quarters (docs/diagnosis.md).
_COMMON, _SPREAD = 0.25, 2.0
#: Tokens weigh differently in a relative difference of gradients than in one of what they are of.
_WEIGHTED = 2.0


@dataclass(frozen=True)
class Inherited:
    """What a stage's results may differ by because of the data that it was given."""

    #: rank, name, inherited: absolute difference of a loss.
    losses: pl.DataFrame
    #: By rank and micro-batch: relative difference of the gradient that the loss sends back.
    gradients: Mapping[tuple[int, int], float]


def annotate(
    table: pl.DataFrame,
    *,
    products: float = 0.0,
    inherited: Inherited | None = None,
    one_precision: bool = False,
    every_layer: set[int] | None = None,
) -> pl.DataFrame:
    """Set ``noise`` (relative L2), ``ratio`` and ``noise_dense`` of a comparison's rows.

    Args:
        table: rows of compare's records.parquet, of one process or several, in order.
        products: unit round-off of matrix products' factors where a device rounds them first:
            2**-11 for TF32; 0 where it does not.
        inherited: what losses and gradients differ by because of what the stage was given.
        one_precision: like devices were asked for one precision: where formats differ all the same,
            round-off is that of the finer one.
        every_layer: numbers of the layers on all processes; None: those of the table.

    ``noise`` is there for every record of floating-point numbers, with or without a partner, and
    for integers that were compared. ``ratio`` is
    error / noise, or the norms' difference over its own bound where that says more (changes of
    parameters); it is infinite for a difference where there is no round-off. ``noise_dense`` bounds
    what a parameter's change differs by besides flipped signs; null elsewhere.
    """
    if table.is_empty():
        return table.with_columns(
            pl.lit(None, pl.Float64).alias(name) for name in ("noise", "ratio", "noise_dense")
        )
    table = table.with_columns(_layer=layers.number())
    every = layers.distinct(table) if every_layer is None else every_layer
    parts = [
        _process(part, products, inherited, one_precision, every)
        for part in table.select(*_NEEDED, "_layer", *_of_weights(table))
        .with_row_index("_row")
        .partition_by(_PROCESS, maintain_order=True)
    ]
    annotated = pl.concat(parts).sort("_row")
    return table.drop("_layer").with_columns(
        annotated.get_column(name) for name in ("noise", "ratio", "noise_dense")
    )


def _of_weights(table: pl.DataFrame) -> list[pl.Expr]:
    """What is known of the weights that a change is of: what rounding them makes of it
    (:mod:`rlprobe.judge.kept`) and their norm (:mod:`rlprobe.judge.held`); null if unknown."""
    return [
        (pl.col(name) if name in table.columns else pl.lit(None, pl.Float64)).alias(name)
        for name in ("rounding", "held")
    ]


def _process(
    table: pl.DataFrame,
    products: float,
    inherited: Inherited | None,
    one_precision: bool,
    every: set[int],
) -> pl.DataFrame:
    """Rows of one process with ``noise`` and ``ratio``, and ``_row``.

    Args:
        table: the process's rows.
        products, inherited, one_precision: see :func:`annotate`.
        every: numbers of the layers on all processes.
    """
    table = _facts(table, one_precision).sort("order", maintain_order=True)
    table = _accumulated(_reductions(table, table), products)
    table = _given(layers.elsewhere(table, every), inherited)
    table = _norms(noise_updates.extend(table, SAFETY))
    return (
        table.with_columns(noise=_bound())
        .with_columns(ratio=_ratio())
        .select("_row", "noise", "ratio", noise_dense="dense_model")
    )


def _facts(table: pl.DataFrame, one_precision: bool) -> pl.DataFrame:
    """Per row: ``u`` (round-off of the coarser side; of the finer where formats must be one),
    ``same`` (bitwise), ``unit`` (what ran). No ``u`` where both sides chose one of a few numbers,
    which is a decision (:mod:`rlprobe.judge.excuses.decisions`).
    """
    chosen = pl.all_horizontal(pl.col(f"dtype_{side}").is_in(roundoff.DECIDED) for side in _SIDES)
    sides = [pl.when(~chosen).then(roundoff.unit(f"dtype_{side}")) for side in _SIDES]
    seen = pl.col("error_kind").is_in(["digest", "tensor"]) & (pl.col("error") == 0)
    quiet = pl.all_horizontal(
        (pl.col(f"{name}_diff") == 0).fill_null(True) for name in ("max", "min", "mean", "norm")
    )
    # What a sketch cannot resolve counts as equal; tensors resolve every bit.
    resolved = (pl.col("error_kind") == "tensor").fill_null(False)
    unseen = (pl.col("error") <= sketch_floors.DEVICES) & pl.col("norm_diff").is_not_null() & quiet
    unseen = unseen & ~resolved
    shape = pl.coalesce("shape_benchmark", "shape_target")
    finer, coarser = pl.min_horizontal(*sides), pl.max_horizontal(*sides)
    table = table.with_columns(
        pairs.elements(table.select(shape).to_series()).alias("size"),
        same=(seen | unseen).fill_null(False),
        unit=pl.coalesce(pl.col("module"), pl.col("op"), pl.col("name")),
    )
    if not one_precision:
        return table.with_columns(u=coarser)
    # A weight may be kept in fp32 on one side, for its optimizer, and on the other in the format
    # that its module computes in on both.
    gives = (pl.col("slot") == "output") & (pl.col("direction") == _FORWARD)
    computed = finer.filter(gives).min().over("unit", "call")
    kept = (pl.col("slot") == "parameters") & computed.is_not_null()
    stored = pl.max_horizontal(finer, pl.min_horizontal(coarser, computed))
    return table.with_columns(u=pl.when(kept).then(stored).otherwise(finer))


def _reductions(table: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """``terms``: how many products each row's operation sums up; ``roundings`` of the result.

    ``computed``: unit round-off of what the operation computes in.
    ``angles``: variance of a rotary table by large angles that were rounded in fp32.
    """
    shape = pl.coalesce("shape_benchmark", "shape_target")
    weights = (
        rows.filter(
            pl.col("slot").is_in(["parameters", *noise_updates.GRADIENTS])
            & (shape.list.len() >= 2)
            & pl.col("module").is_not_null()
        )
        .group_by("module")
        .agg(
            fan_in=(pl.col("size") / shape.list.first()).max(),
            fan_out=shape.list.first().max(),
        )
    )
    modules = rows.get_column("module").drop_nulls().unique()
    parents = {
        name.rsplit(".", cut)[0] for name in modules for cut in range(1, name.count(".") + 1)
    }
    floats = pl.col("u").is_not_null()
    calls = (
        rows.filter(pl.col("direction").is_in([_FORWARD, _BACKWARD]))
        .group_by("unit", "call", "direction")
        .agg(
            # An embedding reads integers and copies rows: nothing is summed.
            copies=~(floats & (pl.col("slot") == "input")).any()
            & (pl.col("slot") == "input").any(),
            widest=shape.filter(floats & (pl.col("slot") == "input"))
            .list.slice(1)
            .list.max()
            .max(),
            reach=pl.col("max_benchmark").filter(~floats & (pl.col("slot") == "input")).max(),
            coarsest=pl.col("u").filter(pl.col("slot").is_in(["input", "output"])).max(),
        )
    )
    table = table.join(weights, on="module", how="left", maintain_order="left").join(
        calls,
        on=["unit", "call", "direction"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    )
    width = (
        pl.when(pl.col("direction") == _BACKWARD)
        .then(pl.col("fan_out"))
        .otherwise(pl.col("fan_in"))
    )
    # What a parent does between its children (attention, gates) is not recorded: it can sum over
    # the sequence or the width of its inputs. Functional calls likewise.
    unknown = pl.col("module").is_in(list(parents)) | pl.col("module").is_null()
    # One that turns its inputs itself (vLLM's) hands out tensors as wide as these.
    narrow = shape.list.last() < pl.col("widest")
    table_of_angles = (pl.col("op").str.contains(_ROTARY) & narrow).fill_null(False)
    return table.with_columns(
        terms=pl.when(pl.col("copies").fill_null(False))
        .then(0.0)
        .when(width.is_not_null())
        .then(width)
        .when(unknown)
        .then(pl.col("widest").fill_null(1))
        .otherwise(0.0)
        .cast(pl.Float64),
        # A matrix product is one operation; what else a module does is not known.
        roundings=pl.when(width.is_not_null() & ~unknown)
        .then(roundoff.STORED)
        .when(table_of_angles & (pl.col("u") > roundoff.FP32))
        .then(roundoff.TABLE * _tipped())
        .otherwise(roundoff.ELEMENTARY),
        # A product is computed in the format of its factors, whatever its result is cast to:
        # autocast hands gradients on in the format of what it was given.
        computed=pl.when(width.is_not_null() & ~unknown)
        .then(pl.max_horizontal("u", "coarsest"))
        .otherwise(pl.col("u")),
        angles=pl.when(table_of_angles)
        .then((_ANGLES * pl.col("reach") * roundoff.FP32).pow(2))
        .fill_null(0.0),
    )


def _tipped() -> pl.Expr:
    """Share of a rotary table's numbers that round-off in fp32 may round to their other side.

    One whose angle is off by d is as likely to as d is a part of the shorter format's step. All of
    them, where the largest angle is not known, or one side keeps the table in another format.
    """
    step = _TIPPED * (1.0 + pl.col("reach")) * roundoff.FP32 / pl.col("u")
    alike = pl.col("dtype_benchmark") == pl.col("dtype_target")
    known = pl.when(alike).then(step).fill_null(1.0)
    return pl.min_horizontal(known, pl.lit(1.0))


def _accumulated(table: pl.DataFrame, products: float) -> pl.DataFrame:
    """``S``: variance accumulated in the pass up to and with each row; null for updates.

    A pass is one forward and its backward (a micro-batch): it begins with each call of the first
    module. An operation's variance is counted once, at the first result that differs: outputs
    forward, gradients of inputs (or, where those are not recorded, of outputs) backward. A router's
    logits may be equal where the weights that it makes of them are not.
    """
    moving = pl.col("direction").is_in([_FORWARD, _BACKWARD]) & (pl.col("slot") != "loss")
    forward = (pl.col("direction") == _FORWARD) & moving
    first = table.filter(forward).head(1)
    unit = first.item(0, "unit") if first.height else None
    key = ["unit", "call", "direction"]
    result = moving & pl.col("slot").is_in(["output", "input"]) & pl.col("u").is_not_null()
    differs = result & ~pl.col("same")
    leading = pl.int_range(pl.len()).over([*key, "slot", differs]) == 0
    has_output = (result & (pl.col("slot") == "output")).any().over(key)
    wanted = pl.when(has_output).then(pl.lit("output")).otherwise(pl.lit("input"))
    counts = (
        differs
        & leading
        & (pl.col("slot") == wanted)
        & ((pl.col("direction") == _BACKWARD) | (pl.col("slot") == "output"))
    )
    table = table.with_columns(
        starts=(
            forward
            & (pl.col("unit") == pl.lit(unit, pl.String))
            & (pl.int_range(pl.len()).over(key) == 0)
        ).fill_null(False),
        own=pl.when(counts)
        .then(
            roundoff.variance(pl.col("computed"), pl.col("terms"), products, pl.col("roundings"))
            + pl.col("angles")
        )
        .otherwise(0.0),
    ).with_columns(micro_batch=pl.col("starts").cast(pl.Int32).cum_sum())
    # An input that differs may come from operations between modules, which nothing recorded: the
    # attention before its output projection, a residual sum.
    width = pl.coalesce("shape_benchmark", "shape_target").list.slice(1).list.max().fill_null(1)
    between = moving & (pl.col("own") == 0) & ~pl.col("same")
    local = pl.when(between).then(roundoff.variance(pl.col("u"), width)).otherwise(0.0)
    return table.with_columns(
        S=pl.when(moving).then(pl.col("own").cum_sum().over("micro_batch") + local)
    )


def _given(table: pl.DataFrame, inherited: Inherited | None) -> pl.DataFrame:
    """``inherited``: absolute, of losses; and ``S`` of a backward pass with what it began with."""
    if inherited is None:
        return table.with_columns(inherited=pl.lit(0.0))
    rank = table.item(0, "rank")
    own = {micro: error for (r, micro), error in inherited.gradients.items() if r == rank}
    passes = max(table.get_column("micro_batch").drop_nulls().to_list(), default=0)
    if passes != len(own):  # passes are not micro-batches here
        own = dict.fromkeys(range(passes + 1), max(own.values(), default=0.0))
    began = pl.DataFrame(
        {
            "micro_batch": pl.Series([micro + 1 for micro in own], dtype=pl.Int32),
            "began": pl.Series(
                [(_WEIGHTED * e / SAFETY) ** 2 for e in own.values()], dtype=pl.Float64
            ),
        }
    )
    return (
        table.join(inherited.losses, on=["rank", "name"], how="left", maintain_order="left")
        .join(began, on="micro_batch", how="left", maintain_order="left")
        .with_columns(
            pl.col("inherited").fill_null(0.0),
            S=pl.when(pl.col("direction") == _BACKWARD)
            .then(pl.col("S") + pl.col("began").fill_null(0.0))
            .otherwise(pl.col("S")),
        )
        .drop("began")
    )


def _norms(table: pl.DataFrame) -> pl.DataFrame:
    """``norm_model``: how far the norms of what two correct devices make may be apart, relatively.

    Roundings to the nearest have no common sign. What n elements are off by stands at right angles
    to them: a norm grows by sqrt(1 + e**2) with it, e being the difference that was measured, and
    along the elements lies a part of 1 / sqrt(n) of it, where a factor moves the norm in full. n
    counts elements as far as they carry the norm; no fewer do than the squared norm over the
    squared largest element. Behind many operations some of what differs is one factor of many
    elements (a token's, a head's): ``_COMMON`` of the bound.
    """
    largest = pl.max_horizontal(pl.col("max_benchmark").abs(), pl.col("min_benchmark").abs())
    carried = (pl.col("norm_benchmark") / largest).clip(lower_bound=1.0).fill_nan(1.0)
    # The norm itself is recorded in the tensor's own format, rounded once on either side.
    recorded = 2.0 * pl.col("u")
    measured = pl.col("error_kind").is_in(["tensor", "sketch"])
    passes = pl.col("direction").is_in([_FORWARD, _BACKWARD]) & pl.col("slot").is_in(
        ["input", "output"]
    )
    gradient = pl.col("slot").is_in(noise_updates.GRADIENTS)
    across = (1.0 + pl.col("error").pow(2)).sqrt() - 1.0
    along = pl.col("model").clip(upper_bound=_UNRELATED) * (_COMMON + _SPREAD / carried)
    # A product of equal inputs has roundings of its own alone.
    key = ["unit", "call", "direction"]
    inputs = (pl.col("slot") == "input") & pl.col("u").is_not_null()
    equal = (inputs & ~pl.col("same")).any().over(key).not_() & inputs.any().over(key)
    product = (
        equal
        & (pl.col("direction") == _FORWARD)
        & (pl.col("slot") == "output")
        & (pl.col("terms") > 0)
        & (pl.col("roundings") == roundoff.STORED)
        & (pl.col("u") > roundoff.FP32)
    ).fill_null(False)
    own = SAFETY * pl.col("u")
    bound = pl.when(product).then(own / carried + own.pow(2) / 2).otherwise(across + along)
    known = (measured & (passes | gradient) & (pl.col("model") > 0)).fill_null(False)
    return table.with_columns(
        norm_model=pl.when(known).then(bound + recorded).otherwise(pl.col("norm_model"))
    )


def _bound() -> pl.Expr:
    """From the bound of the model to what the measurement can resolve."""
    # Unrelated tensors differ by sqrt(2); a loss near 0 may differ by any multiple of itself.
    cap = pl.when(pl.col("slot") == noise_updates.LOSS).then(float("inf")).otherwise(2.0)
    cap = pl.min_horizontal(pl.col("model"), cap)
    sketched = pl.when(pl.col("error_kind") == "sketch").then(sketch_floors.DEVICES).otherwise(0.0)
    coarse = (
        pl.when((pl.col("error_kind") == "statistics") & pl.col("u").is_not_null())
        .then(STATISTICS_RESOLUTION * pl.col("u"))
        .otherwise(0.0)
    )
    bound = pl.max_horizontal(cap, sketched, coarse)
    # Integers have no round-off, but a sketch of them resolves no better.
    exact = pl.when(pl.col("error").is_not_null()).then(sketched)
    return pl.when(pl.col("u").is_null()).then(exact).otherwise(bound)


def _ratio() -> pl.Expr:
    error, noise = pl.col("error"), pl.col("noise")
    by_error = (
        pl.when(error == 0).then(0.0).when(noise > 0).then(error / noise).otherwise(float("inf"))
    )
    norm = pl.col("norm_diff").abs() / pl.col("norm_benchmark")
    by_norm = pl.when(pl.col("norm_model") > 0).then(norm / pl.col("norm_model"))
    return pl.when(error.is_not_null()).then(
        pl.max_horizontal(by_error, by_norm.fill_nan(None).fill_null(0.0))
    )
