"""Causes in the forward code of a module."""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from rlprobe.diagnose import origin as kinds
from rlprobe.diagnose.analysis import Finding
from rlprobe.diagnose.cause.shape import Shape, of
from rlprobe.diagnose.origin import Origin

Found = tuple[str, float, list[str]]

_NORM = re.compile(r"norm", re.IGNORECASE)
_ROTARY = re.compile(r"rotary|rope|position", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_ACTIVATION = re.compile(r"act|silu|gelu|relu|swish", re.IGNORECASE)
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
        return _attention(finding, origin, shape)
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
    unbiased = shape.factor is not None and abs(shape.factor - 1.0) < 0.1 * shape.error
    if _LINEAR.search(operator) and unbiased:
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
    late = [d for d in finding.key_data if d.onset is not None]
    if late:
        said.append(f"{late[0].name} part from position {late[0].onset} of the sequence on")
    # A sequence's first token attends to itself alone: nothing but a mask that lets it see others,
    # or other values, changes what it gets.
    # Read off the result that differs most clearly, as others may show round-off alone.
    clear = max(finding.outcomes, key=lambda outcome: outcome.excess, default=None)
    lone = [
        d
        for d in finding.key_data
        if clear is not None and d.name == clear.name and d.first is not None and d.error
    ]
    touched = any((d.first or 0.0) > _TOUCHED for d in lone)
    chances = _chances(finding, origin)
    if chances is None:
        return _unseen(shape, bool(late), touched, bool(lone), said)
    if not chances["beyond"]:
        return _mixed(shape, bool(late), said)
    if chances["min_benchmark"] == 0 < chances["min_target"]:
        return "mask", 0.9, [*said, "no attention probability is 0 any more: nothing is masked"]
    if chances["max_target"] < 1 == chances["max_benchmark"]:
        return "mask", 0.8, [
            *said, "no token attends to itself alone any more: the first one sees others"
        ]  # fmt: skip
    own = of(chances)
    if own.factor is None or own.error == 0:
        return "mask", 0.4, said
    if own.rounded_to is not None:
        return "rounding_order", 0.6, [*said, f"attention probabilities: {own.said_rounding()}"]
    if late:
        return "mask", 0.6, said
    if touched:
        return "mask", 0.7, [*said, "the first token of a sequence differs: it sees others"]
    # A sharper or flatter softmax moves all probabilities one way; other angles move them about.
    bias = abs(own.factor - 1.0) / own.error
    if bias > _COHERENT:
        return (
            "hyperparameter",
            0.6,
            [
                *said,
                f"masked tokens stay masked and attention is "
                f"{'sharper' if own.factor > 1 else 'flatter'} throughout: another softmax scale",
            ],
        )
    if own.error < _SMALL:
        return "rounding_order", 0.4, [
            *said, f"probabilities differ by {own.error:.2g}, without bias: too little for angles"
        ]  # fmt: skip
    return "position", 0.5, [
        *said, "masked tokens stay masked and attention is as sharp as before: other angles"
    ]  # fmt: skip


def _mixed(shape: Shape, late: bool, said: list[str]) -> Found:
    """Attention whose probabilities agree and whose result does not."""
    if late:
        return "mask", 0.6, said
    bias = 0.0 if shape.factor is None else abs(shape.factor - 1.0) / shape.error
    if bias > _COHERENT:
        return "mask", 0.5, [
            *said, f"its result is {shape.factor:.4g} times as large: other tokens are averaged"
        ]  # fmt: skip
    return "layout", 0.5, [
        *said, "probabilities agree and the mixture is as large as before: other heads' values"
    ]  # fmt: skip


def _unseen(shape: Shape, late: bool, touched: bool, known: bool, said: list[str]) -> Found:
    """Attention of a fused kernel, which gives out no probabilities."""
    if late:
        return "mask", 0.6, said
    bias = 0.0 if shape.factor is None else abs(shape.factor - 1.0) / shape.error
    if touched:
        said = [*said, "the first token of a sequence differs, which attends to itself alone"]
        if bias > _COHERENT:
            return "mask", 0.6, [*said, "its result has another size: it sees others"]
        return "layout", 0.5, [*said, "its result is as large as before: other heads' values"]
    if not known:
        return "unknown", 0.3, [*said, "neither probabilities nor tokens' results tell why"]
    if bias > _COHERENT:
        return "hyperparameter", 0.4, [
            *said, "first tokens agree and the result has another size: another softmax scale"
        ]  # fmt: skip
    return "position", 0.35, [
        *said, "first tokens agree and the result is as large as before: other angles, or rounding"
    ]  # fmt: skip


#: Difference of first tokens, relative to the others', from which on they are touched.
_TOUCHED = 0.2
#: Probabilities that differ by less, without bias, are rounded otherwise: half of what one rounding
#: to bfloat16 makes.
_SMALL = 8e-4
#: Share of the probabilities' difference that is one of size, for a change of scale.
_COHERENT = 0.2


def _chances(finding: Finding, origin: Origin) -> dict[str, Any] | None:
    """Attention probabilities of the same call, where an eager kernel gave them out."""
    rows = finding.stage.rows.filter(
        (pl.col("module") == origin.module)
        & (pl.col("passage") == origin.row["passage"])
        & (pl.col("phase") == origin.row["phase"])
        & (pl.col("slot") == "output")
        & (pl.col("shape_benchmark").list.len() == 4)
        & pl.col("error").is_not_null()
    )
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    known = all(
        row[f"{n}_{s}"] is not None for n in ("min", "max") for s in ("benchmark", "target")
    )
    return (
        row if known and row["min_benchmark"] >= -1e-6 and row["max_benchmark"] <= 1.001 else None
    )
