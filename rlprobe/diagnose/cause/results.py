"""Causes where all modules agree and what is made of their outputs does not."""

from __future__ import annotations

import polars as pl

from rlprobe.diagnose import execution, keydata
from rlprobe.diagnose.analysis import Finding, Step
from rlprobe.diagnose.cause.shape import Shape, of
from rlprobe.diagnose.gate.batch import advantages_floor
from rlprobe.diagnose.origin import Origin

Found = tuple[str, float, list[str]]

#: A mean log-prob ratio on the policy's own data is round-off; this is no round-off.
_OFF_POLICY = 1e-3


def outcome(finding: Finding, origin: Origin) -> Found:
    """A stage's key data parts while every module agrees."""
    moved = [d for d in finding.key_data if d.moved > 0.5]
    if moved:
        return (
            "row_order",
            0.9,
            [
                f"{moved[0].moved:.0%} of the rows of {moved[0].name} that differ are another "
                "sample's of the benchmark: results are handed back in another order"
            ],
        )
    differ = {o.name for o in finding.outcomes if o.excess > 1}
    if "old_log_probs" in differ and "entropys" in differ:
        return (
            "sampling_semantics",
            0.8,
            [
                "logits agree, log-probs and entropies do not: another temperature, or processed "
                "instead of raw log-probs"
            ],
        )
    if differ & {"old_log_probs", "ref_log_prob", "ref_log_probs"}:
        if any(o.name == "entropys" for o in finding.outcomes):
            return (
                "label_or_mask_shift",
                0.7,
                [
                    "logits and entropies agree, the log-probs of the chosen tokens do not: other "
                    "labels, or labels shifted"
                ],
            )
        return "sampling_semantics", 0.5, ["logits agree and log-probs do not"]
    return "unknown", 0.4, [f"{origin.operator} parts after the last module"]


def loss(step: Step, finding: Finding, shape: Shape, row: dict[str, object]) -> Found:
    """The loss, or the first gradient that it sends back, parts."""
    advantages = step.key_data.get(keydata.ADVANTAGES)
    if (
        advantages is not None
        and advantages.error is not None
        and advantages.error > advantages_floor(step.key_data)
    ):
        return (
            "data",
            0.8,
            [
                f"the advantages that the loss was given differ by {advantages.error:.3g}, most in "
                f"sample {advantages.sample}"
            ],
        )
    ratio = _off_policy(finding.stage.rows)
    if ratio is not None:
        return "sampling_semantics", 0.6, [ratio]
    first = _first_gradient(finding.stage.rows)
    if first is not None:
        shape = of(first)
    if shape.scaled and shape.factor is not None:
        return (
            "constant_factor",
            0.8,
            [f"the gradient that the loss sends back is {shape.factor:.6g} times the benchmark's"],
        )
    if shape.rounded_to is not None:
        return "rounding_order", 0.5, [shape.said_rounding()]
    if 1.0 < shape.error < 1.7 and shape.factor is not None and 0.8 < shape.factor < 1.25:
        return (
            "label_or_mask_shift",
            0.5,
            [
                f"the gradient that the loss sends back is as large as the benchmark's and "
                f"unrelated to it (error {shape.error:.2g}, near the root of 2): other labels, or "
                "a shifted mask"
            ],
        )
    return "loss", 0.8, ["the loss makes other gradients of the same outputs, by no common factor"]


def _off_policy(rows: pl.DataFrame) -> str | None:
    """A log-prob ratio that is 1 on the benchmark and not on the target."""
    losses = rows.filter(
        pl.col("judged")
        & (pl.col("phase") == execution.LOSS)
        & pl.col("index").str.contains("ppo_kl|approx_kl")
    )
    values = [
        pl.coalesce(f"max_{side}", pl.col(f"value_{side}").cast(pl.Float64, strict=False))
        for side in ("benchmark", "target")
    ]
    for name, b, t in losses.select("index", *values).iter_rows():
        if b is not None and t is not None and abs(b) < _OFF_POLICY < abs(t):
            return (
                f"{name} is {b:.2g} on the benchmark and {t:.2g} on the target: the update "
                "computes other log-probs from the same logits (temperature, labels)"
            )
    return None


def _first_gradient(rows: pl.DataFrame) -> dict[str, object] | None:
    gradients = rows.filter(
        pl.col("judged")
        & (pl.col("phase") == execution.BACKWARD)
        & (pl.col("slot") == "input")
        & pl.col("beyond")
    )
    return gradients.row(0, named=True) if gradients.height else None
