"""Calls whose counters do not agree: matched by where they stand, not by their number.

``Functional.linear.7`` is the eighth linear of the step. One more call on one side (a cached
rotary embedding, a check, recomputation) shifts every later number. Such functions are matched by
the module record that follows them, which both sides share, and by their place before it; without
modules, by the shapes of their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from rlprobe.compare.match.rules import CALL_COUNTER, Function
from rlprobe.compare.match.state import State

_CALL = ("op", "direction", "call")
_SIDES = ("left", "right")


def uneven(left: pl.DataFrame, right: pl.DataFrame) -> pl.DataFrame:
    """Functions that both sides call, but not equally often: columns op, held.

    In one direction is enough: a backward call has its forward's number, so that a forward without
    a backward shifts both.
    """
    counts = [_function_counts(side) for side in (left, right)]
    both = counts[0].join(counts[1], on=["op", "direction"], suffix="_target")
    shifted = both.filter(pl.col("calls") != pl.col("calls_target"))
    return shifted.select("op", held=pl.lit(True)).unique()


def _function_counts(frame: pl.DataFrame) -> pl.DataFrame:
    functions = frame.filter(pl.col("module").is_null() & pl.col("call").is_not_null())
    return functions.group_by("op", "direction").agg(calls=pl.col("call").n_unique())


def uneven_modules(left: pl.DataFrame, right: pl.DataFrame) -> bool:
    """Whether some module ran forward more often on one side."""
    counts = [
        side.filter(pl.col("module").is_not_null() & (pl.col("direction") == "forward"))
        .group_by("module", "op")
        .agg(calls=pl.col("call").n_unique())
        for side in (left, right)
    ]
    both = counts[0].join(counts[1], on=["module", "op"], suffix="_target")
    return bool((both.get_column("calls") != both.get_column("calls_target")).any())


def renumbered(frame: pl.DataFrame) -> pl.DataFrame:
    """Module calls counted again from 0 in the order they happened."""
    group = ["module", "op", "direction", pl.col("slot") == "grad"]
    first = pl.col("order").min().over([*group, pl.col("call")])
    number = (first.rank("dense").over(group) - 1).cast(pl.Int32)
    new = pl.when(pl.col("module").is_not_null() & pl.col("call").is_not_null()).then(number)
    return frame.with_columns(
        call=pl.coalesce(new, "call"), renumbered=(new != pl.col("call")).fill_null(False)
    )


def by_counterparts(state: State, functions: Sequence[Function]) -> None:
    """Functions that rules call each other's counterparts, in order of their calls."""
    for rule in functions:
        allowed = pl.any_horizontal(
            (pl.col("slot") == slot) & pl.col("index").is_in(indices)
            for slot, indices in rule.slots.items()
        )
        # one name is many times on both sides, which is no business of this rule
        sides = [
            side.filter(pl.col("module").is_null() & pl.col("op").is_in(rule.names) & allowed)
            for side in (state.left, state.right)
        ]
        if any(side.is_empty() for side in sides):
            continue
        position = pl.col("call").rank("dense").over("direction").alias("place")
        slots = pl.int_range(pl.len()).over("direction", "call", "slot").alias("position")
        numbered = [side.with_columns(position).with_columns(slots) for side in sides]
        both = numbered[0].join(
            numbered[1], on=["direction", "place", "slot", "position"], suffix="_target"
        )
        state.add(both, pl.lit(rule.name))


def by_forward(state: State) -> None:
    """Backward calls whose forward calls are matched."""
    if state.left.is_empty() or state.right.is_empty():
        return
    forward = (pl.col("direction") == "forward") & pl.col("module").is_null()
    sides = [state.every[name].filter(forward).select("row", "op", "call") for name in _SIDES]
    numbers = (
        state.pairs()
        .join(sides[0], left_on="benchmark", right_on="row")
        .join(sides[1].select("row", call_target="call"), left_on="target", right_on="row")
        .select("op", "call", "call_target")
        .unique(["op", "call"], keep="first", maintain_order=True)
    )
    backward = (pl.col("direction") == "backward") & pl.col("module").is_null()
    left = state.left.filter(backward).join(numbers, on=["op", "call"])
    both = left.join(
        state.right.filter(backward),
        left_on=["op", "call_target", "slot", "index"],
        right_on=["op", "call", "slot", "index"],
        suffix="_target",
    )
    state.add(both, _same_number())


def by_anchor(state: State, direction: str | None = None) -> None:
    """Functions before the same module record, in order; of one direction, or of both."""
    if state.left.is_empty() or state.right.is_empty():
        return
    pairs = state.pairs().with_row_index("anchor")
    sides = []
    for side, rows, every in (
        ("benchmark", state.left, state.every["left"]),
        ("target", state.right, state.every["right"]),
    ):
        anchors = (
            every.join(pairs.select(pl.col(side).alias("row"), "anchor"), on="row")
            .filter(pl.col("module").is_not_null())
            .select("order", "anchor")
            .sort("order")
        )
        functions = rows.filter(_functions(direction))
        placed = functions.sort("order").join_asof(anchors, on="order", strategy="forward")
        place = pl.col("call").rank("dense").over("anchor", "op", "direction")
        sides.append(placed.with_columns(place=place))
    if any(side.is_empty() for side in sides):
        return
    if sides[0].get_column("anchor").null_count() == sides[0].height:
        return  # no modules: by_signature knows more than the plain order
    key = ["anchor", "op", "direction", "place", "slot", "index"]
    both = sides[0].join(sides[1], on=key, nulls_equal=True, suffix="_target")
    state.add(both, _same_number())


def by_signature(
    state: State, benchmark: pl.DataFrame, target: pl.DataFrame, direction: str | None = None
) -> None:
    """Functions whose arguments have the same dtypes and shapes, in order of their calls."""
    sides = []
    for rows, frame in ((state.left, benchmark), (state.right, target)):
        functions = rows.filter(_functions(direction))
        if functions.is_empty():
            return
        described = functions.with_columns(
            frame[functions.get_column("row")].select("dtype", "shape")
        )
        leaf = pl.struct("slot", "index", "dtype", "shape").hash()
        signature = described.group_by(_CALL, maintain_order=True).agg(
            signature=leaf.sort().implode().list.eval(pl.element().cast(pl.String)).list.join(","),
            first=pl.col("order").min(),
        )
        place = pl.col("first").rank("dense").over("op", "direction", "signature")
        signature = signature.with_columns(place=place)
        sides.append(functions.join(signature, on=list(_CALL)))
    key = ["op", "direction", "signature", "place", "slot", "index"]
    both = sides[0].join(sides[1], on=key, suffix="_target")
    state.add(both, _same_number())


def _functions(direction: str | None) -> pl.Expr:
    chosen = pl.col("module").is_null() & pl.col("call").is_not_null()
    return chosen if direction is None else chosen & (pl.col("direction") == direction)


def _same_number() -> pl.Expr:
    return pl.when(pl.col("plain") != pl.col("plain_target")).then(pl.lit(CALL_COUNTER))
