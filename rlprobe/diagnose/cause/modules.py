"""Causes in the forward code of a module."""

from __future__ import annotations

import re

from rlprobe.diagnose.analysis import Finding
from rlprobe.diagnose.cause import attention
from rlprobe.diagnose.cause.shape import LARGEST_ROUNDING, Shape
from rlprobe.diagnose.origin import Origin
from rlprobe.diagnose.tokens import Profile

Found = tuple[str, float, list[str]]

_NORM = re.compile(r"norm", re.IGNORECASE)
_ROTARY = re.compile(r"rotary|rope|position", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ACTIVATION = re.compile(r"act|silu|gelu|relu|swish", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate$|topk|moe|expert", re.IGNORECASE)
_LINEAR = re.compile(r"linear|matmul|mm$|conv|embedding", re.IGNORECASE)
#: A smaller epsilon enlarges a norm's output by sqrt(1 + eps / mean square) at most: by less than
#: this for the largest epsilon in use, 1e-5, and a mean square of 5e-4.
_ENLARGED = 1.01
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
    if _INTEGER.match(str(row.get("dtype_benchmark"))) and _ROUTER.search(what):
        return "routing", 0.8, [f"{operator} chose other experts: its integer output differs"]
    if _ROUTER.search(what) and str(row.get("index")) != "0":
        return (
            "routing",
            0.7,
            [f"{operator} chooses and weighs experts; its scores agree and its choice does not"],
        )
    if shape.permuted:
        rows = "rows of samples" if row["slot"] == "input" else "elements"
        return "layout", 0.8, [
            f"max, min and norm are equal and the elementwise error is {shape.error:.2g}: the same "
            f"numbers in other places ({rows}, heads or channels permuted)"
        ]  # fmt: skip
    if _NORM.search(what):
        return _norm(shape, operator)
    if shape.scaled and shape.factor is not None:
        return (
            "constant_factor",
            0.85,
            [
                f"the output is {shape.factor:.6g} times the benchmark's: its norm and its error "
                "say the same"
            ],
        )
    if shape.rounded_to is not None:
        return "rounding_order", 0.6, [shape.said_rounding()]
    if _ATTENTION.search(what):
        return attention.cause(finding, origin, shape, profile)
    if _ACTIVATION.search(what):
        return "hyperparameter", 0.4, [f"{operator}: another function or another approximation"]
    if _ROUTER.search(what):
        return "routing", 0.5, [f"{operator} chooses experts, and its output differs"]
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


def _norm(shape: Shape, operator: str) -> Found:
    if shape.rounded_to is not None:
        return (
            "rounding_order",
            0.7,
            [
                f"an unbiased error of {shape.error:.2g}: {operator} rounds to {shape.rounded_to} "
                "at another place (a cast before the weight is multiplied, say)"
            ],
        )
    if shape.scaled and shape.factor is not None and shape.factor > _ENLARGED:
        return "constant_factor", 0.8, [
            f"the output is {shape.factor:.6g} times the benchmark's, more than a smaller epsilon "
            "can enlarge it"
        ]  # fmt: skip
    factor = f"{shape.factor:.6g}" if shape.factor is not None else "?"
    return (
        "hyperparameter",
        0.7,
        [
            f"{operator} rescales each token, and its output's norm is {factor} of the "
            "benchmark's: another epsilon, or another mean square"
        ],
    )
