"""The blocks of a model: its layers, and the modules that stand before and behind them."""

from __future__ import annotations

import re

import polars as pl

#: A numbered member of a list of modules: a layer, whatever the list is called.
_BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")
#: Blocks whose outputs are kept.
_LIMIT = 256


def blocks(rows: pl.DataFrame) -> tuple[str, ...]:
    """The modules that follow each other in a stage's records, none within another.

    Args:
        rows: the stage's, with ``order``, ``module`` and ``direction``.
    """
    ran = rows.filter((pl.col("direction") == "forward") & pl.col("module").is_not_null())
    paths = ran.sort("order").get_column("module").unique(maintain_order=True).to_list()
    within = [(layer.group(1) if (layer := _BLOCK.match(path)) else path) for path in paths]
    chosen = list(dict.fromkeys(within))
    enclosing = {path for path in chosen if any(o.startswith(f"{path}.") for o in chosen)}
    found = [path for path in chosen if path not in enclosing]
    return tuple(found) if 1 < len(found) <= _LIMIT else ()
