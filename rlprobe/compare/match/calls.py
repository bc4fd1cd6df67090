"""Calls whose counters do not agree: aligned in the order they happened, not by their number.

``Functional.linear.7`` is the eighth linear of the step. One more call on one side (a cached
rotary embedding, a check, recomputation, a warm-up forward) shifts every later number. Calls are
laid beside each other as sequences (:mod:`.alignment`): functions between the module records that
both sides share, modules called more often on one side among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from rlprobe.compare.match import alignment
from rlprobe.compare.match.rules import AMBIGUOUS, CALL_COUNTER, Function
from rlprobe.compare.match.state import State

_SIDES = ("left", "right")
_FUNCTION = pl.col("module").is_null() & pl.col("call").is_not_null()
#: Modules run forward, backward and have their gradients recorded, each with its own counter.
_PHASE = ("direction", "gradient")
#: Leaves of a call whose numbers describe it.
_LEAVES = 8


def uneven(left: pl.DataFrame, right: pl.DataFrame, shifted: bool = False) -> pl.DataFrame:
    """Functions to be aligned: columns op, held. All, or none where every call has its own twin.

    Both sides call the same functions in the same order, or numbers mean nothing: a function that
    is called as often may still be shifted against the others.

    Args:
        left, right: records of both sides.
        shifted: values say that calls of one number are not each other's (:mod:`.shift`).
    """
    for direction in ("forward", "backward"):
        made = [_sequence(side, direction) for side in (left, right)]
        if shifted or not made[0].equals(made[1]):
            break
    else:
        return pl.DataFrame(schema={"op": pl.String, "held": pl.Boolean})
    ops = [side.filter(_FUNCTION).get_column("op").unique() for side in (left, right)]
    both = ops[0].filter(ops[0].is_in(ops[1].implode()))
    return both.to_frame("op").with_columns(held=pl.lit(True))


def _sequence(frame: pl.DataFrame, direction: str) -> pl.DataFrame:
    """Name of every function called, in order."""
    calls = frame.filter(_FUNCTION & (pl.col("direction") == direction))
    return calls.select("op", "call").unique(maintain_order=True)


def uneven_modules(left: pl.DataFrame, right: pl.DataFrame, path: str = "module") -> bool:
    """Whether some module ran forward more often on one side, or is counted from another number."""
    counts = [
        side.filter(pl.col(path).is_not_null() & (pl.col("direction") == "forward"))
        .group_by(pl.col(path).alias("_path"), *(["op"] if path == "module" else []))
        .agg(**_COUNTED)
        for side in (left, right)
    ]
    on = [name for name in counts[0].columns if name not in _COUNTED]
    both = counts[0].join(counts[1], on=on, suffix="_target")
    return not both.filter(_COUNTED_OTHERWISE).is_empty()


#: How often a module is called, and the numbers of its first call and its last.
_COUNTED = {
    "calls": pl.col("call").n_unique(),
    "number": pl.col("call").min(),
    "last": pl.col("call").max(),
}
_COUNTED_OTHERWISE = pl.any_horizontal(
    pl.col(name) != pl.col(f"{name}_target") for name in _COUNTED
)


def renumbered(frame: pl.DataFrame, rule: str) -> pl.DataFrame:
    """Module calls counted again from 0 in the order they happened."""
    group = ["module", "op", "direction", pl.col("slot") == "grad"]
    first = pl.col("order").min().over([*group, pl.col("call")])
    number = (first.rank("dense").over(group) - 1).cast(pl.Int32)
    new = pl.when(pl.col("module").is_not_null() & pl.col("call").is_not_null()).then(number)
    return frame.with_columns(
        call=pl.coalesce(new, "call"),
        renumbered=pl.when(new != pl.col("call")).then(pl.lit(rule)),
        moved=(new != pl.col("call")).fill_null(False),
    )


def align_modules(state: State, benchmark: pl.DataFrame, target: pl.DataFrame) -> None:
    """Calls of modules that one side calls more often get the number of their counterpart.

    Column ``path`` names the module on both sides.
    """
    if not uneven_modules(state.left, state.right, "path"):
        return
    sides = [
        side.filter(pl.col("path").is_not_null() & pl.col("call").is_not_null()).with_columns(
            key=pl.col("path"), gradient=pl.col("slot") == "grad"
        )
        for side in (state.left, state.right)
    ]
    counts = [side.group_by("key", *_PHASE).agg(**_COUNTED) for side in sides]
    keys = (
        counts[0]
        .join(counts[1], on=["key", *_PHASE], suffix="_target")
        .filter(_COUNTED_OTHERWISE)
        .get_column("key")
        .unique()
    )
    numbers = []
    for direction, gradient in (("forward", False), ("backward", False), ("backward", True)):
        phase = (pl.col("direction") == direction) & (pl.col("gradient") == gradient)
        chosen = [side.filter(phase & pl.col("key").is_in(keys.implode())) for side in sides]
        pairs = _aligned((chosen[0], chosen[1]), (benchmark, target))
        numbers.append(pairs.with_columns(direction=pl.lit(direction), gradient=pl.lit(gradient)))
    found = pl.concat(numbers).select("key", *_PHASE, "call", "call_target", "ambiguous")
    # what stays alone gets a number that the other side cannot have
    alone = 1 << 30
    right = state.right.with_columns(gradient=pl.col("slot") == "grad").join(
        found.rename({"key": "path", "call": "new", "call_target": "call"}),
        on=["path", *_PHASE, "call"],
        how="left",
        maintain_order="left",
    )
    # gradients and changes of an update are numbered by update, not by call
    ran = pl.col("direction").is_in(["forward", "backward"])
    aligned = pl.col("path").is_in(keys.implode()) & pl.col("call").is_not_null() & ran
    new = pl.when(aligned).then(pl.coalesce("new", pl.col("call") + alone)).otherwise("call")
    rule = pl.when(pl.col("ambiguous").fill_null(False)).then(pl.lit(AMBIGUOUS))
    state.right = right.with_columns(
        call=new.cast(pl.Int32),
        renumbered=pl.when(aligned).then(
            rule.otherwise(pl.when(new != pl.col("call")).then(pl.lit(CALL_COUNTER)))
        ),
        moved=pl.col("moved") | aligned,
    ).drop("new", "ambiguous", "gradient")
    state.left = state.left.with_columns(moved=pl.col("moved") | aligned)


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
        .select("op", "call", "call_target", ambiguous=pl.col("rule").eq_missing(AMBIGUOUS))
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
    state.add(both, _why())


def by_order(state: State, benchmark: pl.DataFrame, target: pl.DataFrame, direction: str) -> None:
    """Functions aligned between the module records that both sides have; leftovers by themselves.

    What crosses other functions but none of its own kind (two independent calls in the other
    order) is paired if its shapes agree and its values are near.
    """
    sides = _functions(state, direction)
    if any(side.is_empty() for side in sides):
        return
    anchors = state.pairs().with_row_index("anchor")
    before = (
        _before(sides[0], state.every["left"], anchors, "benchmark"),
        _before(sides[1], state.every["right"], anchors, "target"),
    )
    pairs = _aligned(before, (benchmark, target))
    _note(state, sides, pairs)
    sides = _functions(state, direction)
    if any(side.is_empty() for side in sides):
        return
    between = [_between(side, pairs, call) for side, call in zip(sides, _CALLS, strict=True)]
    _note(state, sides, _aligned((between[0], between[1]), (benchmark, target), alike=True))


_CALLS = ("call", "call_target")


def _functions(state: State, direction: str) -> list[pl.DataFrame]:
    chosen = _FUNCTION & (pl.col("direction") == direction)
    return [side.filter(chosen).with_columns(key="op") for side in (state.left, state.right)]


def _before(
    side: pl.DataFrame, every: pl.DataFrame, pairs: pl.DataFrame, name: str
) -> pl.DataFrame:
    """Group: the module record matched on both sides that follows."""
    anchors = (
        every.join(pairs.select(pl.col(name).alias("row"), "anchor"), on="row")
        .filter(pl.col("module").is_not_null())
        .select("order", "anchor")
        .sort("order")
    )
    placed = side.sort("order").join_asof(anchors, on="order", strategy="forward")
    return placed.with_columns(group=pl.col("anchor").cast(pl.String))


def _between(side: pl.DataFrame, pairs: pl.DataFrame, call: str) -> pl.DataFrame:
    """Group: the function, and its next call that is matched."""
    known = pairs.select("key", anchor="call", call=call)
    placed = side.sort("call").join_asof(
        known.sort("call"), on="call", by="key", strategy="forward", check_sortedness=False
    )
    return placed.sort("order").with_columns(
        group=pl.concat_str("key", pl.col("anchor").cast(pl.String).fill_null(""), separator=" ")
    )


def _note(state: State, sides: Sequence[pl.DataFrame], pairs: pl.DataFrame) -> None:
    """Match the records of calls that are pairs."""
    left = sides[0].join(pairs, on=["key", "call"])
    both = left.join(
        sides[1],
        left_on=["key", "call_target", "slot", "index"],
        right_on=["key", "call", "slot", "index"],
        suffix="_target",
    )
    state.add(both, _why())


def _why() -> pl.Expr:
    return (
        pl.when("ambiguous")
        .then(pl.lit(AMBIGUOUS))
        .when(pl.col("plain") != pl.col("plain_target"))
        .then(pl.lit(CALL_COUNTER))
    )


_Both = tuple[pl.DataFrame, pl.DataFrame]


def _aligned(made: _Both, every: _Both, alike: bool = False) -> pl.DataFrame:
    """Pairs of calls: key, call, call_target, ambiguous; group by group where there are groups.

    Args:
        made: records of both sides' calls in order, with columns key and perhaps group.
        every: all records of the sides, which ``row`` counts.
        alike: only pairs of the same dtypes and shapes and of near values.
    """
    sides = [_described(side, frame) for side, frame in zip(made, every, strict=True)]
    keys = pl.concat([side.get_column("key") for side, _ in sides]).rank("dense")
    codes = keys.to_numpy().astype(np.int64)
    height = sides[0][0].height
    calls = [
        alignment.Calls(part, side.get_column("signature").to_numpy(), values)
        for part, (side, values) in zip((codes[:height], codes[height:]), sides, strict=True)
    ]
    groups = [
        side.with_row_index("n").group_by("group", maintain_order=True).agg("n")
        for side, _ in sides
    ]
    both = groups[0].join(
        groups[1], on="group", nulls_equal=True, suffix="_target", maintain_order="left"
    )
    found: list[pl.DataFrame] = []
    for _, *rows in both.iter_rows():
        chosen = [np.array(r, np.int64) for r in rows]
        left, right = (side.taken(r) for side, r in zip(calls, chosen, strict=True))
        pairs = alignment.align(left, right)
        keep = alignment.alike(left, right, pairs) if alike else slice(None)
        found.append(
            pl.DataFrame(
                {
                    "n": chosen[0][pairs.left[keep]],
                    "n_target": chosen[1][pairs.right[keep]],
                    "ambiguous": pairs.ambiguous[keep],
                }
            )
        )
    rows_of = pl.DataFrame(schema={"n": pl.Int64, "n_target": pl.Int64, "ambiguous": pl.Boolean})
    rows_found = pl.concat([rows_of, *found])
    (one, _), (other, _) = sides
    return pl.DataFrame(
        {
            "key": one.get_column("key").gather(rows_found.get_column("n")),
            "call": one.get_column("call").gather(rows_found.get_column("n")),
            "call_target": other.get_column("call").gather(rows_found.get_column("n_target")),
            "ambiguous": rows_found.get_column("ambiguous"),
        }
    )


def _described(side: pl.DataFrame, frame: pl.DataFrame) -> tuple[pl.DataFrame, alignment.Floats]:
    """A row per call (key, call, group, signature), and the numbers of its first leaves."""
    if "group" not in side.columns:
        side = side.with_columns(group=pl.lit("", pl.String))
    side = side.select("row", "key", "call", "group", "slot", "index", "order").sort("order")
    about = frame[side.get_column("row")].select(
        "dtype",
        "shape",
        pl.coalesce("max", pl.col("value").cast(pl.Float64, strict=False)).alias("top"),
        "min",
        "norm",
        # tells equal from unequal only
        pl.when(pl.col("digest").is_not_null()).then(pl.col("digest").hash() / 2**32).alias("said"),
    )
    leaves = pl.concat([side, about], how="horizontal").with_columns(
        leaf=pl.int_range(pl.len()).over("key", "call"),
        _hash=pl.struct("slot", "index", "dtype", "shape").hash(),
    )
    calls = leaves.group_by("key", "call", maintain_order=True).agg(
        pl.col("group").first(), signature=pl.col("_hash").sum()
    )
    first = (
        leaves.filter(pl.col("leaf") < _LEAVES)
        .join(calls.select("key", "call").with_row_index("n"), on=["key", "call"])
        .select("n", "leaf", *_NUMBERS)
    )
    values = np.full((calls.height, _LEAVES, len(_NUMBERS)), np.nan)
    values[first.get_column("n").to_numpy(), first.get_column("leaf").to_numpy()] = (
        first.select(pl.col(name).cast(pl.Float64) for name in _NUMBERS)
        .to_numpy()
        .reshape(-1, len(_NUMBERS))
    )
    return calls, values.reshape(calls.height, _LEAVES * len(_NUMBERS))


_NUMBERS = ("top", "min", "norm", "said")
