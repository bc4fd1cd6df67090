"""Which record of one side is which of the other, within one process.

Every record of both sides ends up in exactly one row. Records of the same name come first; what is
left is matched by rules (:mod:`rlprobe.compare.rules`), each on the leftovers of the one before.
All of it is joins and sorts: n log n at worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from rlprobe.compare import calls, fusing, recompute
from rlprobe.compare.pairs import Matches
from rlprobe.compare.rules import CHUNKS, CLASS, RECOMPUTE, WRAPPERS, Rules

#: What identifies a record on both sides once wrappers are out of its module path.
KEY = ("module", "op", "call", "direction", "slot", "index")

_MATCHED = {"benchmark": pl.UInt32, "target": pl.UInt32, "rule": pl.String}


@dataclass(frozen=True)
class Matched:
    """The pairs, and both sides with the records that stand for several joined ones."""

    benchmark: pl.DataFrame
    target: pl.DataFrame
    matches: Matches


def match(benchmark: pl.DataFrame, target: pl.DataFrame, rules: Rules) -> Matched:
    """Pair the records of two processes.

    Both frames hold the columns of :data:`rlprobe.compare.pairs.LOADED`, in execution order.
    """
    state = _State(_prepared(benchmark), _prepared(target))
    _set_repetitions_aside(state)
    held = calls.uneven(state.left, state.right)
    aside = state.take_aside(held)
    state.by_name()
    state.join(KEY, WRAPPERS)
    _rename(state, rules)
    state.join(("path", *KEY[1:]), WRAPPERS, label="renamed")
    state.join(("path", *KEY[2:]), CLASS)
    benchmark, target = fusing.fuse(state, benchmark, target, rules.fuses)
    state.put_back(aside)
    calls.by_counterparts(state, rules.functions)
    calls.by_anchor(state, "forward")
    calls.by_signature(state, benchmark, target, "forward")
    calls.by_forward(state)
    calls.by_anchor(state)
    calls.by_signature(state, benchmark, target)
    return Matched(benchmark, target, state.finished())


@dataclass
class _State:
    """What is matched so far, and what is left of both sides."""

    left: pl.DataFrame
    right: pl.DataFrame
    found: list[pl.DataFrame] = field(default_factory=list)
    #: Rows set aside for good, with the rule that says why.
    single: list[pl.DataFrame] = field(default_factory=list)
    #: Both sides in full, as they were given.
    every: dict[str, pl.DataFrame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.every = {"left": self.left, "right": self.right}

    def by_name(self) -> None:
        """Records of the same name; names are unique within a process unless a file is odd."""
        if any(side.get_column("plain").is_duplicated().any() for side in (self.left, self.right)):
            return
        same = self.left.filter(~pl.col("renumbered")).join(
            self.right.filter(~pl.col("renumbered")), on="plain", suffix="_target"
        )
        self.add(same, pl.lit(None, pl.String))

    def join(self, key: Sequence[str], rule: str, label: str | None = None) -> None:
        """Records of the same key; ``label`` is a column naming the rule better."""
        if self.left.is_empty() or self.right.is_empty():
            return
        key = list(key)
        usable = pl.col(key[0]).is_not_null() if key[0] == "path" else pl.lit(True)
        # An occurrence number where wrappers leave several records of one key.
        number = pl.int_range(pl.len(), dtype=pl.UInt32).over(key).alias("number")
        sides = [side.filter(usable).with_columns(number) for side in (self.left, self.right)]
        both = sides[0].join(sides[1], on=["number", *key], nulls_equal=True, suffix="_target")
        names = [pl.col(label), pl.col(f"{label}_target")] if label else []
        why = (
            pl.when(pl.col("plain") == pl.col("plain_target"))
            .then(None)
            .when(pl.col("renumbered") | pl.col("renumbered_target"))
            .then(pl.lit(RECOMPUTE))
            .otherwise(pl.coalesce(*names, pl.lit(rule)))
        )
        self.add(both, why)

    def add(self, both: pl.DataFrame, rule: pl.Expr) -> None:
        """Note pairs (columns ``row`` and ``row_target``) and take them out of what is left."""
        if both.is_empty():
            return
        pairs = both.select(benchmark="row", target="row_target", rule=rule.cast(pl.String))
        self.found.append(pairs)
        self.left = self.left.filter(~pl.col("row").is_in(pairs.get_column("benchmark").implode()))
        self.right = self.right.filter(~pl.col("row").is_in(pairs.get_column("target").implode()))

    def set_single(self, side: str, rows: pl.Series, rule: str) -> None:
        """Rows that have no counterpart by their nature."""
        if not len(rows):
            return
        frame = pl.DataFrame({side: rows}, schema={side: pl.UInt32})
        self.single.append(frame.with_columns(rule=pl.lit(rule)))

    def take_aside(self, held: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
        """Keep functions (column op) out of the next passes."""
        taken = []
        for name in ("left", "right"):
            side = getattr(self, name)
            function = pl.col("module").is_null()
            joined = side.join(held, on="op", how="left", maintain_order="left")
            apart = joined.select(pl.col("held").fill_null(False) & function).to_series()
            taken.append(side.filter(apart))
            setattr(self, name, side.filter(~apart))
        return taken[0], taken[1]

    def put_back(self, aside: tuple[pl.DataFrame, pl.DataFrame]) -> None:
        sides = (self.left, aside[0]), (self.right, aside[1])
        self.left, self.right = (pl.concat(side, how="diagonal").sort("order") for side in sides)

    def pairs(self) -> pl.DataFrame:
        """Everything matched so far: benchmark, target, rule."""
        return pl.concat([pl.DataFrame(schema=_MATCHED), *self.found])

    def finished(self) -> Matches:
        empty = pl.lit(None, pl.UInt32)
        singles = [
            self.left.select(benchmark="row", target=empty, rule=pl.lit(None, pl.String)),
            self.right.select(benchmark=empty, target="row", rule=pl.lit(None, pl.String)),
        ]
        every = pl.concat([self.pairs(), *singles, *self.single], how="diagonal")
        return Matches(*every.select(list(_MATCHED)).get_columns())


def _prepared(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        "name",
        *KEY,
        "order",
        row=pl.int_range(pl.len(), dtype=pl.UInt32),
        # msprobe calls a keyword argument kwargs.x in one task and input.x in the other
        plain=pl.col("name").str.replace(".kwargs.", ".input.", literal=True),
        path=pl.lit(None, pl.String),
        renamed=pl.lit(None, pl.String),
        renumbered=pl.lit(False),
    )


def _set_repetitions_aside(state: _State) -> None:
    """Where one side recomputes activations and the other does not, drop the repeated calls."""
    if not calls.uneven_modules(state.left, state.right):
        return
    again = [recompute.repeated(side) for side in (state.left, state.right)]
    if bool(again[0].any()) == bool(again[1].any()):
        return
    for name, side, repeated in (
        ("benchmark", "left", again[0]),
        ("target", "right", again[1]),
    ):
        frame: pl.DataFrame = getattr(state, side)
        state.set_single(name, frame.filter(repeated).get_column("row"), RECOMPUTE)
        setattr(state, side, calls.renumbered(frame.filter(~repeated)))


def _rename(state: _State, rules: Rules) -> None:
    """Column ``path``: the module path as the rules rewrite it; ``renamed``: by which rule."""
    for name in ("left", "right"):
        side: pl.DataFrame = getattr(state, name)
        new = rewritten(side.get_column("module").drop_nulls().unique().to_list(), rules)
        table = pl.DataFrame(
            {
                "module": list(new),
                "path": [path for path, _ in new.values()],
                "renamed": [rule for _, rule in new.values()],
            },
            schema={"module": pl.String, "path": pl.String, "renamed": pl.String},
        )
        side = side.drop("path", "renamed").join(
            table, on="module", how="left", maintain_order="left"
        )
        setattr(state, name, side)


def rewritten(paths: Sequence[str], rules: Rules) -> dict[str, tuple[str, str | None]]:
    """Module paths as the rules spell them, and by which rule; None where none applied."""
    chunks = _consecutive(paths)
    found = {}
    for path in paths:
        new, rule = (chunks[path], CHUNKS) if path in chunks else (path, None)
        for rename in rules.renames:
            after = rename.apply(new)
            if after != new:
                new, rule = after, rule or rename.name
        found[path] = new, rule
    return found


def _consecutive(paths: Sequence[str]) -> dict[str, str]:
    """Megatron's chunks ``0.decoder.layers.0``, ``1.decoder.layers.0`` with layers numbered on.

    Right where chunks follow one another on this rank, which they do without pipeline parallelism.
    """
    layers: dict[int, int] = {}
    found: dict[str, tuple[int, str]] = {}
    for path in paths:
        chunk, _, rest = path.partition(".")
        if chunk.isdecimal() and rest:
            found[path] = int(chunk), rest
            number = fusing.layer_number(rest)
            if number is not None:
                layers[int(chunk)] = max(layers.get(int(chunk), 0), number + 1)
    first = {chunk: sum(n for c, n in layers.items() if c < chunk) for chunk in range(len(layers))}
    return {
        path: fusing.with_layer_added(rest, first.get(chunk, 0))
        for path, (chunk, rest) in found.items()
    }
