"""Records of both models side by side, whatever either calls them."""

from __future__ import annotations

import polars as pl

from rlprobe.compare import measures
from rlprobe.compare.match import matcher, pairs
from rlprobe.compare.match.rules import Rules


def matched(benchmark: pl.DataFrame, target: pl.DataFrame, rules: Rules) -> pl.DataFrame:
    """The measured rows of records with columns :data:`rlprobe.compare.match.pairs.LOADED`."""
    found = matcher.match(benchmark, target, rules)
    return measures.measure(pairs.side_by_side(found.benchmark, found.target, found.matches))


def halves(rules: Rules) -> frozenset[str]:
    """Modules that are two of equal size on the other side, such as ``gate_up_proj``."""
    return frozenset(fuse.whole for fuse in rules.fuses if len(fuse.parts) == 2)
