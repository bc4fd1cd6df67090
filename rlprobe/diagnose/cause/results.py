"""Causes where all modules agree and what is made of their outputs does not."""

from __future__ import annotations

from typing import Any

import polars as pl

from rlprobe.diagnose.cause import repeated, subset
from rlprobe.diagnose.cause.found import Found, unknown
from rlprobe.diagnose.cause.shape import Shape, lacks, of, times
from rlprobe.judge import execution, fits, given
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.origin import Origin

#: A mean log-prob ratio on the policy's own data is round-off; this is no round-off.
_OFF_POLICY = 1e-3
#: Share of a difference's square that a law of all tokens must explain.
_EXPLAINED = 0.97


def outcome(step: Step, finding: Finding, origin: Origin) -> Found:
    """A stage's key data parts while every module agrees."""
    moved = [d for d in finding.key_data if d.moved > _EXPLAINED]
    if moved:
        return Found("row_order", [
            f"{moved[0].moved:.0%} of the rows of {moved[0].name} that differ lead to another "
            "sample's of the benchmark: results are handed back in another order"
        ])  # fmt: skip
    shifted = [d for d in finding.key_data if d.shift is not None]
    if shifted:
        return Found("label_or_mask_shift", [
            f"{shifted[0].name} are displaced along the sequence: what stands at a token is the "
            f"benchmark's of {abs(shifted[0].shift or 0)} "
            f"{'later' if (shifted[0].shift or 0) > 0 else 'earlier'}"
        ])  # fmt: skip
    differ = {o.name for o in finding.outcomes if o.excess > 1}
    log_probs = sorted(differ & set(_ENTROPY_OF))
    if log_probs:
        return _log_probs(step, finding, log_probs[0], differ)
    return unknown(f"{origin.operator} parts after the last module, by no law of the results alone")


#: Log-probs, and the entropies of the same tokens.
_ENTROPY_OF = {
    "old_log_probs": "entropys",
    "update_log_probs": "update_entropys",
    "ref_log_prob": None,
    "ref_log_probs": None,
    "teacher_log_probs": None,
}


def _log_probs(step: Step, finding: Finding, name: str, differ: set[str]) -> Found:
    """Log-probs part and logits do not, or none were joined."""
    entropy = _ENTROPY_OF[name]
    measured = {o.name for o in finding.outcomes}
    said = [] if finding.stage.misplaced else ["logits agree"]
    if entropy in measured:
        said.append(f"entropies {'differ too' if entropy in differ else 'agree'}")
    pairs = [(b, t) for _, b, t in step.key_data[name].pairs]
    lone = subset.fit(pairs)
    if lone is not None:
        return Found("label_or_mask_shift", [*said, f"{name}: {lone.said}"])
    said += [f"{name}: {subset.counted(pairs)}"]
    fitted = _temperature(step, name, entropy)
    if fitted is not None and fitted.explained > _EXPLAINED:
        return Found("sampling_semantics", [
            *said,
            f"{name} differ as they do where the target's temperature is {_said(fitted)} times the "
            f"benchmark's (that explains {fitted.explained:.1%} of the difference to first order)",
        ])  # fmt: skip
    if fitted is not None:
        said.append(f"no temperature explains the difference ({fitted.explained:.0%})")
    if finding.stage.misplaced:  # what follows is said of logits that agree
        return unknown(*said)
    if fits.constant(pairs):
        return Found("sampling_semantics", [
            *said, f"{name} of all tokens are shifted alike: probabilities are normalised otherwise"
        ])  # fmt: skip
    together = fits.drawn_together(pairs)
    if entropy in measured and together is not None and together.explained > _EXPLAINED:
        return Found("sampling_semantics", [
            *said,
            f"{name} are {times(1.0 + together.coefficient)} times the benchmark's and a constant "
            f"({together.explained:.1%} of the difference): mixed with the mean over the "
            "vocabulary, as with smoothed labels",
        ])  # fmt: skip
    if fits.one_sided(pairs):
        said.append(f"{name} are larger on the target wherever they differ much")
    return unknown(*said)


def _said(fitted: fits.Fit) -> str:
    """The fitted ratio, with what it is good to."""
    if fitted.error is None:
        return f"about {times(fitted.coefficient)} (a first-order estimate)"
    if abs(fitted.coefficient - 1.0) < 1e-3:
        return times(fitted.coefficient)
    return f"{fitted.coefficient:.4g} (standard error {fitted.error:.1g})"


def _temperature(step: Step, name: str, entropy: str | None) -> fits.Fit | None:
    """The temperature that comes nearest to explaining the log-probs."""
    log_probs = step.key_data.get(name)
    if log_probs is None:
        return None
    # the computation's own entropies, or those of the log-prob stage, whose logits the update's are
    near = [(entropy, True)] + [("entropys", False)] * (name == "update_log_probs")
    for other, own in near:
        entropies = step.key_data.get(other or "")
        if entropies is None:
            continue
        known = {sample: (b, t if own else None) for sample, b, t in entropies.pairs}
        shared = [pair for pair in log_probs.pairs if pair[0] in known]
        if shared:
            return fits.temperature(
                [(b, t) for _, b, t in shared], [known[sample] for sample, _, _ in shared]
            )
    return fits.temperature([(b, t) for _, b, t in log_probs.pairs], None)


def loss(step: Step, finding: Finding, shape: Shape, row: dict[str, Any]) -> Found:
    """The loss, or the first gradient that it sends back, parts."""
    for item in given.wrong(step.key_data, finding.stage.name):
        return Found("label_or_mask_shift" if item.is_mask else "data", [item.said])
    lone = _lone_parts(finding.stage.rows)
    if lone:
        return Found("loss", [f"the loss has a part on one side only: {', '.join(lone)}"])
    said = []
    ratio = _off_policy(finding.stage.rows)
    if ratio is not None:
        found = _whose_log_probs(step, finding, *ratio)
        if found.cause != "unknown":
            return found
        said += found.said
    first = _first_gradient(finding.stage.rows)
    if first is not None:
        shape = of(first)
    judged = row if first is None else first
    if shape.factor is not None and repeated.factors(finding, judged) is not None:
        return Found("constant_factor", [
            *said,
            f"the gradient that the loss sends back is {times(shape.factor)} times the benchmark's",
        ])  # fmt: skip
    if shape.rounded_to is not None and repeated.rounds(finding, judged):
        return Found("rounding_order", [*said, shape.said_rounding()])
    said.append("the loss makes other values or gradients of the same outputs, by no common factor")
    apart = None if first is None else repeated.sizes(finding, first)
    if apart is not None:
        said[-1] += f": {times(apart[0])} to {times(apart[1])} times as large, by micro-batch"
    if first is not None and lacks(shape, first):
        said.append(
            "the gradient that the loss sends back is as where a part of it "
            f"({shape.error**2:.1%} of its square) is set to 0 and the rest is as before"
        )
    return unknown(*said)


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


def _whose_log_probs(step: Step, finding: Finding, ratio: str, size: float) -> Found:
    """Whether another ratio of log-probs comes from the update's own or from those it was given.

    Args:
        step: for what the update was given.
        finding: the update.
        ratio: what is said of it.
        size: by how much its mean differs, in nats.
    """
    own = next((o for o in finding.outcomes if o.name == _OWN_LOG_PROBS), None)
    if own is not None and own.excess > 1:
        differ = {o.name for o in finding.outcomes if o.excess > 1}
        found = _log_probs(step, finding, _OWN_LOG_PROBS, differ)
        said = f"{ratio}: the update's own log-probs differ by {own.error:.2g}"
        return Found(found.cause, [said, *found.said])
    old = step.key_data.get(_GIVEN_LOG_PROBS)
    moved = 0.0 if old is None else old.error or 0.0
    if old is not None and old.max_abs >= size and moved > (0.0 if own is None else own.error):
        said = "" if own is None else (
            f", although the update's own log-probs agree (they differ by {own.error:.2g})"
        )  # fmt: skip
        return Found("data", [
            f"{ratio}{said}: the old log-probs that it was given differ by {moved:.3g}. The "
            "difference came in with them, from the stage that computed them"
        ])  # fmt: skip
    if old is None:
        return unknown(f"{ratio}; neither the log-probs it computes nor those given are known")
    return unknown(f"{ratio}, and the old log-probs that the update was given agree")


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
