"""Causes in the forward code of a module."""

from __future__ import annotations

import math
import re
from typing import Any

import polars as pl

from rlprobe.diagnose.cause import attention, repeated, routers
from rlprobe.diagnose.cause.shape import LARGEST_ROUNDING, Shape, times
from rlprobe.judge import execution
from rlprobe.judge.analysis import Finding
from rlprobe.judge.origin import Origin
from rlprobe.judge.tokens import Profile

Found = tuple[str, float, list[str]]

_NORM = re.compile(r"norm", re.IGNORECASE)
_ROTARY = re.compile(r"rotary|rope|position", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ACTIVATION = re.compile(r"act|silu|gelu|relu|swish", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate$|topk|moe|expert", re.IGNORECASE)
_LINEAR = re.compile(r"linear|matmul|mm$|conv|embedding", re.IGNORECASE)
#: The largest epsilon in use. Without it a norm's output is sqrt(1 + eps / mean square) as large.
_EPSILON = 1e-5
#: Tokens are not all as large as the mean of their squares says; most are smaller than the largest.
_SMALLER = 10.0
#: Mean square that is assumed where the input is not known.
_MEAN_SQUARE = 5e-3
_INTEGER = re.compile(r"torch\.(u?int|long|short|bool)")


def forward(
    finding: Finding, origin: Origin, shape: Shape, profile: Profile | None = None
) -> Found:
    """The cause where a forward record parts first."""
    row = origin.row
    index, operator = str(row.get("index")), str(origin.operator or row.get("op"))
    module = origin.module or ""
    if row["slot"] == "input":
        named = _named_input(index, row)
        if named is not None:
            return named
    # The last component of a path says what a module is for: `mlp.gate` and `q_norm`.
    what = f"{operator} {module.rpartition('.')[2]}"
    if _ROTARY.search(operator) and shape.rounded_to is not None:
        return "rounding_order", 0.6, [f"{operator}'s tables: {shape.said_rounding()}"]
    if _ROTARY.search(operator):
        return "position", 0.8, [f"{operator} turns positions into angles, and its output differs"]
    if _ROUTER.search(what):
        found = routers.cause(finding, origin, operator)
        if found is not None:
            return found
    if shape.permuted:
        rows = "rows of samples" if row["slot"] == "input" else "elements"
        return "layout", 0.8, [
            f"max, min and norm are equal and the elementwise error is {shape.error:.2g}: the same "
            f"numbers in other places ({rows}, heads or channels permuted)"
        ]  # fmt: skip
    if _NORM.search(what):
        return _norm(finding, row, shape, operator)
    if shape.factor is not None and repeated.factors(finding, row) is not None:
        return (
            "constant_factor",
            0.85,
            [
                f"the {row['slot']} is {times(shape.factor)} times the benchmark's, and nothing "
                "else differs"
            ],
        )
    if shape.rounded_to is not None:
        return "rounding_order", 0.6, [shape.said_rounding()]
    if _ATTENTION.search(what):
        return attention.cause(finding, origin, shape, profile)
    if _ACTIVATION.search(what):
        return "hyperparameter", 0.4, [f"{operator}: another function or another approximation"]
    if _ROUTER.search(what):
        return routers.output(finding, origin, operator)
    if shape.offset is not None and abs(shape.offset) > 0.5 * shape.error:
        return (
            "unknown",
            0.4,
            [f"the whole output is off by {shape.offset:.2g} of its size: a bias, or none"],
        )
    biases = (shape.factor or 0.0) - 1.0, shape.offset or 0.0
    unbiased = max(map(abs, biases)) < 0.1 * shape.error
    if _LINEAR.search(operator) and unbiased and shape.error < LARGEST_ROUNDING:
        said = f"a product with an unbiased error of {shape.error:.2g}, no factor and no offset"
        return "rounding_order", 0.4, [said]
    return "unknown", 0.3, [f"an error of {shape.error:.2g} that is no factor, rounding or order"]


def _named_input(index: str, row: dict[str, object]) -> Found | None:
    if "mask" in index:
        return "mask", 0.9, [f"the input {index} differs"]
    if "position" in index or _ROTARY.search(str(row.get("op"))):
        return "position", 0.9, [f"the input {index} differs"]
    if _INTEGER.match(str(row.get("dtype_benchmark"))):
        return "data", 0.7, [f"the integer input {index} differs"]
    return None


def _norm(finding: Finding, row: dict[str, Any], shape: Shape, operator: str) -> Found:
    if shape.rounded_to is not None:
        return (
            "rounding_order",
            0.7,
            [
                f"an unbiased error of {shape.error:.2g}: {operator} rounds to {shape.rounded_to} "
                "at another place (a cast before the weight is multiplied, say)"
            ],
        )
    most = _enlarged(_mean_square(finding, row))
    factor = shape.factor
    if factor is not None and factor > most and repeated.factors(finding, row) is not None:
        return "constant_factor", 0.8, [
            f"the output is {times(factor)} times the benchmark's, and a smaller epsilon can make "
            f"it {times(most)} times as large at most"
        ]  # fmt: skip
    size = f"{times(factor)} times" if factor is not None else "not known as a multiple of"
    return (
        "hyperparameter",
        0.7,
        [
            f"{operator} rescales each token, and its output's norm is {size} the benchmark's: "
            "another epsilon, or another mean square"
        ],
    )


def _mean_square(finding: Finding, row: dict[str, Any]) -> float | None:
    """Mean square of the input that a norm's output was made of; None where it is not known."""
    table = finding.stage.rows
    if "call_id" not in row:
        return None
    inputs = table.filter(
        (pl.col("call_id") == row["call_id"])
        & (pl.col("rank") == row.get("rank"))
        & (pl.col("phase") == execution.FORWARD)
        & (pl.col("slot") == "input")
        & pl.col("shape_benchmark").list.len().ge(2)
        & (pl.col("norm_benchmark") > 0)
    )
    if inputs.is_empty():
        return None
    first = inputs.row(0, named=True)
    size = float(math.prod(first["shape_benchmark"]))
    return float(first["norm_benchmark"]) ** 2 / size


def _enlarged(mean_square: float | None) -> float:
    """What a norm's output is at most where an epsilon in use is left out, over that with it."""
    smallest = _MEAN_SQUARE if mean_square is None else mean_square
    return math.sqrt(1.0 + _EPSILON / (smallest / _SMALLER))
