"""What only one of both models recorded, module by module, in a sentence."""

from __future__ import annotations

import re

import polars as pl

from rlprobe.compare import measures
from rlprobe.said import Said, listed, say

_LAYER = re.compile(r"\.\d+(?=\.|$)")
#: Modules that a sentence names; all of them are in the records.
_NAMED = 12
_MODELS = {measures.BENCHMARK_ONLY: say("the engine"), measures.TARGET_ONLY: say("training")}


def lacking(table: pl.DataFrame) -> list[Said]:
    """A sentence a model whose modules have no counterpart at all in the other.

    Layers of one model are alike, so that their numbers are left out: ``layers.*.attn``.

    Args:
        table: measured rows of one pass, columns of :mod:`rlprobe.compare.writer`.
    """
    met = set(
        table.filter(~pl.col("status").is_in(list(_MODELS))).get_column("module").drop_nulls()
    )
    found = []
    for status, model in _MODELS.items():
        alone = table.filter((pl.col("status") == status) & pl.col("reason").is_null())
        modules = dict.fromkeys(
            _LAYER.sub(".*", module) or say("the whole model")
            for module in alone.get_column("module").drop_nulls()
            if module not in met
        )
        if modules:
            found.append(
                say(
                    "recorded in {model} only, and not compared: {modules}",
                    model=model,
                    modules=listed(modules, _NAMED),
                )
            )
    return found
