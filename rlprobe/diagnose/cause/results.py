"""Causes where all modules agree and what is made of their outputs does not."""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.diagnose.cause import repeated
from rlprobe.diagnose.cause.shape import Shape, lacks, of, times
from rlprobe.judge import execution, fits, given
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.origin import Origin

Found = tuple[str, float, list[str]]

#: A mean log-prob ratio on the policy's own data is round-off; this is no round-off.
_OFF_POLICY = 1e-3


def outcome(step: Step, finding: Finding, origin: Origin) -> Found:
    """A stage's key data parts while every module agrees."""
    moved = [d for d in finding.key_data if d.moved > 0.5]
    if moved:
        return (
            "row_order",
            0.9,
            [
                f"{moved[0].moved:.0%} of the rows of {moved[0].name} that differ lead to "
                "another sample's of the benchmark: results are handed back in another order"
            ],
        )
    shifted = [d for d in finding.key_data if d.shift is not None]
    if shifted:
        return (
            "label_or_mask_shift",
            0.85,
            [
                f"{shifted[0].name} are displaced along the sequence: what stands at a token is "
                f"the benchmark's of {abs(shifted[0].shift or 0)} "
                f"{'later' if (shifted[0].shift or 0) > 0 else 'earlier'}"
            ],
        )
    differ = {o.name for o in finding.outcomes if o.excess > 1}
    log_probs = sorted(differ & set(_ENTROPY_OF))
    if log_probs:
        return _log_probs(step, finding, log_probs[0], differ)
    if finding.stage.misplaced:
        return "unknown", 0.3, ["by no law of the results alone"]
    return "unknown", 0.4, [f"{origin.operator} parts after the last module"]


#: Log-probs, and the entropies of the same tokens.
_ENTROPY_OF = {
    "old_log_probs": "entropys",
    "update_log_probs": "update_entropys",
    "ref_log_prob": None,
    "ref_log_probs": None,
    "teacher_log_probs": None,
}
#: Share of the difference that a temperature must explain: with the tokens' own entropies on both
#: sides, with the benchmark's, with none. Other labels explain 0.5 and 0.3 of the last two at most.
_OWN, _BENCHMARKS, _NONE = 0.97, 0.8, 0.45
#: Rounding logits of ten to bf16 changes log-probs by as much, in nats.
_ROUNDED = 0.2


def _log_probs(step: Step, finding: Finding, name: str, differ: set[str]) -> Found:
    """Log-probs part and logits do not: a temperature, another processing, or other labels."""
    entropy = _ENTROPY_OF[name]
    measured = {o.name for o in finding.outcomes}
    known = entropy in measured
    fitted, enough = _temperature(step, name, entropy)
    if fitted is not None and fitted.explained > enough:
        agree = "" if finding.stage.misplaced else "logits agree, and "
        return (
            "sampling_semantics",
            0.9 if entropy in differ else 0.7,
            [
                f"{agree}{name} differ as they do where the target's temperature is "
                f"{_said(fitted)} times the benchmark's (a temperature explains "
                f"{fitted.explained:.1%} of the difference to first order)"
            ],
        )
    unlike = "" if fitted is None else f"; no temperature explains it ({fitted.explained:.0%})"
    if finding.stage.misplaced:  # what follows is said of logits that agree
        return "unknown", 0.3, [f"by no law of the results alone{unlike}"]
    if known and entropy in differ:
        return (
            "sampling_semantics",
            0.7,
            [f"logits agree, {name} and entropies do not: processed or raw log-probs{unlike}"],
        )
    said = "logits and entropies agree" if known else "logits agree"
    pairs = [(b, t) for _, b, t in step.key_data[name].pairs]
    if fits.one_sided(pairs):
        return (
            "sampling_semantics",
            0.6,
            [
                f"{said}, and {name} of all tokens are larger on the target: probabilities are "
                f"normalised over fewer tokens (top-k, top-p, a mask){unlike}"
            ],
        )
    if fits.constant(pairs):
        return (
            "sampling_semantics",
            0.5,
            [
                f"{said}, and {name} of all tokens are shifted alike: probabilities are normalised "
                f"otherwise (a vocabulary with padding, say){unlike}"
            ],
        )
    together = fits.drawn_together(pairs)
    if known and together is not None:
        return (
            "sampling_semantics",
            0.5,
            [
                f"{said}, and {name} are {times(1.0 + together.coefficient)} times the benchmark's "
                f"and a constant ({together.explained:.1%} of the difference): mixed with the mean "
                "over the vocabulary, as with smoothed labels"
            ],
        )
    if fits.unrelated(pairs) and step.key_data[name].max_abs < _ROUNDED:
        return (
            "rounding_order",
            0.5,
            [
                f"{said}, {name} do not, by {step.key_data[name].max_abs:.2g} at most, without "
                "bias and whatever their size: they are rounded otherwise. Other labels' would lie "
                "nearer to the mean"
            ],
        )
    return (
        "label_or_mask_shift",
        0.7 if known else 0.55,
        [f"{said}, {name} of the chosen tokens do not: other or shifted labels{unlike}"],
    )


def _said(fitted: fits.Fit) -> str:
    """The fitted ratio, with what it is good to."""
    if fitted.error is None:
        return f"about {times(fitted.coefficient)} (a first-order estimate)"
    if abs(fitted.coefficient - 1.0) < 1e-3:
        return times(fitted.coefficient)
    return f"{fitted.coefficient:.4g} (standard error {fitted.error:.1g})"


def _temperature(step: Step, name: str, entropy: str | None) -> tuple[fits.Fit | None, float]:
    """A temperature that explains the log-probs, and the share that it must explain."""
    log_probs = step.key_data.get(name)
    if log_probs is None:
        return None, _NONE
    # the computation's own entropies, or those of the log-prob stage, whose logits the update's are
    near = [(entropy, True)] + [("entropys", False)] * (name == "update_log_probs")
    for other, own in near:
        entropies = step.key_data.get(other or "")
        if entropies is None:
            continue
        known = {sample: (b, t if own else None) for sample, b, t in entropies.pairs}
        shared = [pair for pair in log_probs.pairs if pair[0] in known]
        if shared:
            found = fits.temperature(
                [(b, t) for _, b, t in shared], [known[sample] for sample, _, _ in shared]
            )
            return found, _OWN if own else _BENCHMARKS
    return fits.temperature([(b, t) for _, b, t in log_probs.pairs], None), _NONE


def loss(step: Step, finding: Finding, shape: Shape, row: dict[str, Any]) -> Found:
    """The loss, or the first gradient that it sends back, parts."""
    for item in given.wrong(step.key_data, finding.stage.name):
        if item.is_mask:
            return "label_or_mask_shift", 0.85, [item.said]
        return "data", 0.85, [item.said]
    lone = _lone_parts(finding.stage.rows)
    if lone:
        return "loss", 0.8, [f"the loss has a part on one side only: {', '.join(lone)}"]
    ratio = _off_policy(finding.stage.rows)
    if ratio is not None:
        found = _whose_log_probs(step, finding, *ratio)
        if found is not None:
            return found
    first = _first_gradient(finding.stage.rows)
    if first is not None:
        shape = of(first)
    judged = row if first is None else first
    if shape.factor is not None and repeated.factors(finding, judged) is not None:
        return (
            "constant_factor",
            0.8,
            [
                f"the gradient that the loss sends back is {times(shape.factor)} times the "
                "benchmark's"
            ],
        )
    if shape.once and repeated.rounds(finding, judged) and _loss_parts(finding.stage.rows):
        return "rounding_order", 0.5, [shape.said_rounding()]
    if first is not None and lacks(shape, first):
        return (
            "label_or_mask_shift",
            0.6,
            [
                f"the gradient that the loss sends back is the benchmark's without a part of it "
                f"({shape.error**2:.1%} of its square) and the rest is as before: tokens are left "
                "out, as by a shorter or shifted mask"
            ],
        )
    if first is not None and _spares(shape, first):
        return (
            "label_or_mask_shift",
            0.45,
            [
                f"the gradient that the loss sends back differs by {shape.error:.2g}, and an "
                "extreme of it is as before: some tokens count otherwise and others do not, as "
                "with a shifted mask"
            ],
        )
    # other labels would show in the update's own log-probs, which agree where they are known
    own = any(outcome.name == _OWN_LOG_PROBS for outcome in finding.outcomes)
    others = "a shifted mask" if own else "other labels, or a shifted mask"
    if 1.0 < shape.error < 1.7 and shape.factor is not None and 0.8 < shape.factor < 1.25:
        return (
            "label_or_mask_shift",
            0.5,
            [
                f"the gradient that the loss sends back is as large as the benchmark's and "
                f"unrelated to it (error {shape.error:.2g}, near the root of 2): {others}"
            ],
        )
    said = "the loss makes other gradients of the same outputs, by no common factor"
    apart = None if first is None else repeated.sizes(finding, first)
    if apart is not None:
        said += f": {times(apart[0])} to {times(apart[1])} times as large, by micro-batch"
    return "loss", 0.8, [said]


#: Extremes that moved by less than this share of the error are as they were.
_SPARED = 0.02


def _spares(shape: Shape, row: dict[str, object]) -> bool:
    """Whether the largest or the smallest element, hence the token that holds it, is as before.

    What is computed otherwise (another estimator, factor or rounding) moves all tokens' gradients;
    what counts other tokens moves those tokens' alone.
    """
    kept = [
        isinstance(b, float) and isinstance(t, float) and b != 0
        and abs(t - b) <= _SPARED * shape.error * abs(b)
        for b, t in ((row.get(f"{n}_benchmark"), row.get(f"{n}_target")) for n in ("max", "min"))
    ]  # fmt: skip
    return any(kept)


def _loss_parts(rows: pl.DataFrame) -> bool:
    """Whether the loss's own value parts: a loss of coarser numbers has a coarser value, one that
    is made otherwise may have the same value and another gradient."""
    own = rows.filter(pl.col("judged") & (pl.col("phase") == execution.LOSS))
    return own.filter(pl.col("beyond")).height > 0


def _lone_parts(rows: pl.DataFrame) -> list[str]:
    """Parts of the loss that one side alone has, with the side."""
    lone = rows.filter(
        (pl.col("slot") == "loss") & pl.col("status").is_in(["benchmark_only", "target_only"])
    )
    return sorted(
        {
            f"{index} ({status.removesuffix('_only')})"
            for index, status in lone.select("index", "status").iter_rows()
        }
    )


def _whose_log_probs(step: Step, finding: Finding, ratio: str, size: float) -> Found | None:
    """Whether another ratio of log-probs comes from the update's own or from those it was given.

    None where both agree: then something else is made of them.

    Args:
        step: for what the update was given.
        finding: the update.
        ratio: what is said of it.
        size: by how much its mean differs, in nats.
    """
    own = next((o for o in finding.outcomes if o.name == _OWN_LOG_PROBS), None)
    if own is not None and own.excess > 1:
        return "sampling_semantics", 0.6, [
            f"{ratio}: the update computes other log-probs from the same logits (temperature, "
            f"labels), which differ by {own.error:.2g}"
        ]  # fmt: skip
    old = step.key_data.get(_GIVEN_LOG_PROBS)
    moved = 0.0 if old is None else old.error or 0.0
    if old is not None and old.max_abs >= size and moved > (0.0 if own is None else own.error):
        said = "" if own is None else (
            f", although the update's own log-probs agree (they differ by {own.error:.2g})"
        )  # fmt: skip
        return "data", 0.6, [
            f"{ratio}{said}: the old log-probs that it was given differ by {moved:.3g}. The "
            "difference came in with them, from the stage that computed them"
        ]  # fmt: skip
    if own is None:
        if old is None:
            said = "the update computes other log-probs or was given others; neither are known"
            return "sampling_semantics", 0.4, [f"{ratio}: {said}"]
        return "sampling_semantics", 0.5, [
            f"{ratio}, and the old log-probs that the update was given agree: it computes others "
            "from the same logits (temperature, labels)"
        ]  # fmt: skip
    return None


#: Log-probs that an update of the policy computes, and those that it is given.
_OWN_LOG_PROBS, _GIVEN_LOG_PROBS = "update_log_probs", "given_old_log_probs"


def _off_policy(rows: pl.DataFrame) -> tuple[str, float] | None:
    """A log-prob ratio that is 1 on the benchmark and not on the target: in words, and its size."""
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
            return f"{name} is {b:.2g} on the benchmark and {t:.2g} on the target", abs(t - b)
    return None


def _first_gradient(rows: pl.DataFrame) -> dict[str, Any] | None:
    gradients = rows.filter(
        pl.col("judged")
        & (pl.col("phase") == execution.BACKWARD)
        & (pl.col("slot") == "input")
        & pl.col("beyond")
    )
    return gradients.row(0, named=True) if gradients.height else None
