"""Causes in the forward code of a module."""

from __future__ import annotations

import re

from rlprobe.diagnose import origin as kinds
from rlprobe.diagnose.analysis import Finding
from rlprobe.diagnose.cause.shape import Shape
from rlprobe.diagnose.origin import Origin

Found = tuple[str, float, list[str]]

_NORM = re.compile(r"norm", re.IGNORECASE)
_ROTARY = re.compile(r"rotary|rope|position", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ROUTER = re.compile(r"router|gate$|topk|moe|expert", re.IGNORECASE)
_LINEAR = re.compile(r"linear|matmul|mm$|conv|embedding", re.IGNORECASE)
_INTEGER = re.compile(r"torch\.(u?int|long|short|bool)")


def forward(finding: Finding, origin: Origin, shape: Shape) -> Found:
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
    if _ROTARY.search(operator):
        return "position", 0.8, [f"{operator} turns positions into angles, and its output differs"]
    if _INTEGER.match(str(row.get("dtype_benchmark"))) and _ROUTER.search(what):
        return "routing", 0.8, [f"{operator} chose other experts: its integer output differs"]
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
        summed = _LINEAR.search(operator) is not None
        return (
            ("accumulation" if summed else "rounding_order"),
            0.6,
            [shape.said_rounding()],
        )
    if _ATTENTION.search(what):
        return _attention(finding, origin, shape)
    if _ROUTER.search(what):
        return "routing", 0.5, [f"{operator} chooses experts, and its output differs"]
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
    factor = f"{shape.factor:.6g}" if shape.factor is not None else "?"
    return (
        "hyperparameter",
        0.7,
        [
            f"{operator} rescales each token, and its output's norm is {factor} of the "
            "benchmark's: another epsilon, or another mean square"
        ],
    )


def _attention(finding: Finding, origin: Origin, shape: Shape) -> Found:
    said = [
        "queries, keys and values agree and what attention makes of them does not"
        if origin.kind == kinds.GLUE
        else "the attention's output differs"
    ]
    onset = [d for d in finding.key_data if d.position is not None and d.error]
    if onset:
        first = min(onset, key=lambda d: d.position or 0)
        said.append(
            f"{first.name} part from token {first.position} of the response on, in the sample "
            "that differs most"
        )
    if shape.offset is not None and abs(shape.offset) > 0.5 * shape.error:
        said.append(f"its mean is off by {shape.offset:.2g} of its size")
    return "mask", 0.5, said
