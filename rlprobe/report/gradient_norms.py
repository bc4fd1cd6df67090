"""Norms of gradients by parameter group, of both sides: what a trainer reports as one number."""

from __future__ import annotations

import re
from collections.abc import Iterable

import polars as pl

from rlprobe import stages
from rlprobe.report.narrowed import Narrowed

#: Groups by what a module's path has in it; the first that fits. ``norm`` stands before what it is
#: a norm of (``post_attention_layernorm``).
_GROUPS = (
    ("norm", re.compile(r"norm|(^|\.)ln_", re.IGNORECASE)),
    ("embedding", re.compile(r"embed|(^|\.)wte", re.IGNORECASE)),
    ("attention", re.compile(r"attn|attention", re.IGNORECASE)),
    ("experts", re.compile(r"expert|router|mlp\.gate$", re.IGNORECASE)),
    ("mlp", re.compile(r"mlp|ffn|feed_forward", re.IGNORECASE)),
    ("head", re.compile(r"lm_head|v_head|score|output_layer|classifier", re.IGNORECASE)),
)
#: As the optimizer's step reduces them over ranks and micro-batches.
_REDUCED = "grad_reduced"


def by_group(
    judged: Narrowed, names: Iterable[str], first_step: int
) -> dict[tuple[int, str], tuple[float, float]]:
    """Norms of the first update of every captured step, as ``{stage}/grad_norm/{group}``.

    Args:
        judged: the judged tables. One of which ranks were left out gives none: a sharded
            parameter's norm is of all ranks together.
        names: of stages.
        first_step: the trainer's number of the first captured step.

    Returns:
        (the trainer's step, name) -> the benchmark's norm and the target's, over the parameters
        that both sides have.
    """
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for stage in names:
        if stage not in stages.UPDATE_STAGES:
            continue
        part = judged.part(stage)
        if part.narrowed:
            continue
        norms = [pl.col(f"norm_{side}") for side in ("benchmark", "target")]
        rows = part.rows.filter(
            (pl.col("slot") == _REDUCED)
            & (pl.col("call").fill_null(0) == 0)
            & pl.col("module").is_not_null()
            & pl.all_horizontal(norm.is_finite() for norm in norms)
        )
        squares: dict[tuple[int, str], list[float]] = {}
        for step, module, *values in rows.select("step", "module", *norms).iter_rows():
            sums = squares.setdefault((step, group(module)), [0.0, 0.0])
            for side, value in enumerate(values):
                sums[side] += value * value
        for (step, name), (b, t) in squares.items():
            found[first_step + step, f"{stage}/grad_norm/{name}"] = b**0.5, t**0.5
    return found


def group(module: str) -> str:
    """Which part of a model a module is of."""
    return next((name for name, pattern in _GROUPS if pattern.search(module)), "other")
