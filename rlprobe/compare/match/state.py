"""What is matched so far of one process's records, and what is left of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from rlprobe.compare.match.pairs import Matches
from rlprobe.compare.match.rules import AMBIGUOUS, MAPPED

_MATCHED = {"benchmark": pl.UInt32, "target": pl.UInt32, "rule": pl.String}


@dataclass
class State:
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

    def by_mapping(self) -> None:
        """Records whose counterpart a mapping file names; a name that nobody has matches none."""
        given = self.right.filter(pl.col("mapped").is_not_null())
        if given.is_empty():
            return
        wanted = given.drop("plain").rename({"mapped": "plain"}).unique("plain", keep="first")
        same = self.left.join(wanted, on="plain", suffix="_target")
        self.add(same, pl.lit(MAPPED))

    def by_name(self) -> None:
        """Records of the same name; names are unique within a process unless a file is odd."""
        if any(side.get_column("plain").is_duplicated().any() for side in (self.left, self.right)):
            return
        sides = [side.filter(~pl.col("moved")) for side in (self.left, self.right)]
        same = sides[0].join(sides[1], on="plain", suffix="_target")
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
            pl.when(pl.coalesce("renumbered", "renumbered_target") == AMBIGUOUS)
            .then(pl.lit(AMBIGUOUS))
            .when(pl.col("plain") == pl.col("plain_target"))
            .then(None)
            .otherwise(pl.coalesce("renumbered", "renumbered_target", *names, pl.lit(rule)))
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
