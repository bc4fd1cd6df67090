"""What the trainer reports of a judged step, held against what it is made of.

A trainer's numbers are means, extremes and sums of what was recorded and is judged: losses, key
data, gradients. Such a number moves by no more than what it is made of does ::

    mean, max, min of key data        the largest difference of any of its values
    sums over a sequence              the largest sum of differences of any sequence
    means and sums of losses          the sum of the differences of their records
    a norm of gradients               the floor of the gradients' norm
    log-ratios to the rollout         2 T times the largest difference of a log-prob, T the longest
                                      response: exp of a sum over it, to first order
    1 - var(R - V) / var(R)           its differential, with sup |dV| + sup |dR| for each deviation

and by its own round-off. So nothing of chaos is in it: a number that differs by more was not made
of the records that agree. What is set (a learning rate) or of the rollouts (turns, scores) is the
same number. Of any other metric nothing is known, and nothing is said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from rlprobe import stages
from rlprobe.judge import execution, keydata
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.curves import FEW, PRINTED, SET, SHARE
from rlprobe.judge.keydata import Difference
from rlprobe.judge.roundoff import FP32, UNIT

#: Of the rollouts that both sides have.
_ROLLOUTS = re.compile(r"(^|/)(num_turns|score|aborted_ratio)(/|$)")
_RETURNS = re.compile(r"(^|/)returns?(/|$)")
#: Name of key data by what a metric calls it; sums over a sequence apart.
_KEY_DATA = (
    (re.compile(r"(^|/)advantages?(/|$)"), (keydata.ADVANTAGES,)),
    (_RETURNS, ("given_returns",)),
    (re.compile(r"(^|/)values?(/|$)"), ("values", "given_values")),
    (re.compile(r"(^|[/_])entropy(/|$)"), ("entropys", "update_entropys")),
    (re.compile(r"(^|/)(old_)?log_probs(/|$)"), ("old_log_probs",)),
    (re.compile(r"(^|/)ref_log_probs?(/|$)"), ("ref_log_prob", "ref_log_probs")),
)
_SUMS = re.compile(r"(^|/)rewards?(/|$)")
_RATIOS = re.compile(r"rollout_corr/|rollout_.*(probs|logprob)|(^|/)train_rollout_")
_EXPLAINED = re.compile(r"explained_var")
#: The same of everything that is made of key data.
_MADE_OF = (
    *_KEY_DATA,
    (_SUMS, (keydata.REWARDS,)),
    (_RATIOS, ("old_log_probs",)),
    (_EXPLAINED, ("given_values", "given_returns")),
)
_GRADIENTS = re.compile(r"(^|[/_])grad_norm$")
#: Metrics that are never 0 where they were computed; any other may be: a loss whose advantages sum
#: to nothing, KL and clipped shares before the first update, a coefficient that is not used, a
#: learning rate that warms up, a reward that nobody won.
_NEVER_ZERO = (
    _GRADIENTS,
    re.compile(r"(^|[/_])entropy(/|$)"),
    re.compile(r"(^|/)(old_|ref_)?log_probs?(/|$)"),
    re.compile(r"(^|[/_])ppl$"),
)
#: A loss is called as its record, by all of its name or the end of it.
_LOSS = re.compile(r"^loss\.(.+?)\.\d+(\.debug)?$")
_ROLES = {"actor": stages.ACTOR_UPDATE, "critic": stages.CRITIC_UPDATE}
#: Roundings of the mean of many numbers, in units of the largest.
_MEAN = 16.0
#: A mean is itself rounded to the format of what it is a mean of.
_OWN = 2.0
_FORMATS = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
#: A deviation that may move by this share of itself says nothing of its quotient any more.
_UNKNOWN = 0.25


@dataclass(frozen=True)
class Reported:
    """One metric of a judged step on both sides, and what it may differ by."""

    metric: str
    benchmark: float
    target: float
    #: None where what it is made of is not finite.
    allowed: float | None

    @property
    def differs(self) -> bool:
        """Whether it is not what its records make, or is finite on one side alone."""
        finite = [math.isfinite(value) for value in (self.benchmark, self.target)]
        if finite[0] != finite[1]:
            return True
        if self.allowed is None:
            return False
        return all(finite) and abs(self.target - self.benchmark) > self.allowed


def judge(
    step: Step,
    benchmark: Mapping[str, float],
    target: Mapping[str, float],
    *,
    gradients: float,
    tokens: int | None,
    precisions: Collection[str],
) -> list[Reported]:
    """The metrics of a step of which it is known what they are made of.

    Args:
        step: the judged step.
        benchmark: its metrics of that step, by name.
        target: the same of the target.
        gradients: what the norm of all gradients may differ by, relative.
        tokens: response tokens of the step; None where unknown.
        precisions: that the sides compute in.

    Returns:
        those that both sides report, in the order of names.
    """
    rounded = max((UNIT[_FORMATS.get(one, "torch.float32")] for one in precisions), default=FP32)
    known = _Sources(step, gradients, tokens, rounded)
    found = []
    for name in sorted(benchmark.keys() & target.keys()):
        b, t = benchmark[name], target[name]
        if not (math.isfinite(b) or math.isfinite(t)):
            continue
        if b == t == 0 and is_never_zero(name):
            continue  # 0 = 0 says nothing
        allowed = known.allowed(name, b if math.isfinite(b) else t)
        if allowed is None:
            continue
        # what it is made of is not finite itself: nothing bounds it, and one side alone is apart
        unbounded = not math.isfinite(allowed)
        if not unbounded or math.isfinite(b) != math.isfinite(t):
            found.append(Reported(name, b, t, None if unbounded else float(allowed)))
    return found


def is_never_zero(metric: str) -> bool:
    """Whether a metric that is 0 was not computed."""
    return any(known.search(metric) is not None for known in _NEVER_ZERO)


def not_finite(step: Step) -> dict[str, list[re.Pattern[str]]]:
    """What of a step is not finite on both sides alike, which bounds nothing that is made of it.

    Args:
        step: the judged step.

    Returns:
        key data and losses by what they are called, with what a metric made of them is called.
    """
    odd = [name for name, difference in step.key_data.items() if difference.both_nonfinite]
    found = {name: [known for known, names in _MADE_OF if name in names] for name in odd}
    for stage in _ROLES.values():
        if stage not in step.findings:
            continue
        for name, rows in losses(step.findings[stage]).items():
            sides = [[v for v in row[:2] if v is not None] for row in rows]
            if any(own and not any(map(math.isfinite, own)) for own in sides):
                # called as the loss, or the end of what it is called
                either = re.escape(name).replace("_", "[/_]")
                found[name] = [re.compile(rf"(^|[/_]){either}$")]
    return found


@dataclass(frozen=True)
class _Sources:
    """What the metrics of a step are made of."""

    step: Step
    gradients: float
    tokens: int | None
    #: Unit round-off of the precision.
    unit: float

    def allowed(self, name: str, value: float) -> float | None:
        """What a metric may differ by; None where nothing says what it is made of."""
        size = abs(value)
        if SET.search(name) or _ROLLOUTS.search(name):
            return PRINTED * size + np.finfo(np.float64).tiny
        if _GRADIENTS.search(name):
            return (self.gradients + _OWN * self.unit) * size
        ways: tuple[Callable[[str, float], float | None], ...] = (
            self._of_losses, self._of_key_data, self._of_sums, self._of_ratios, self._of_variance,
        )  # fmt: skip
        found = next((a for way in ways if (a := way(name, size)) is not None), None)
        if found is None:
            return None
        if SHARE.search(name) and self.tokens:
            found = max(found, FEW / self.tokens)
        return found + _OWN * self.unit * size

    def _of_losses(self, name: str, size: float) -> float | None:
        moved = [_moved(*row) for known in self._updates(name) for row in _of_metric(known, name)]
        known = [one for one in moved if one is not None]
        return sum(known) if known and len(known) == len(moved) else None

    def _updates(self, name: str) -> list[dict[str, list[_Loss]]]:
        role = next((_ROLES[part] for part in name.split("/") if part in _ROLES), None)
        wanted = [role] if role is not None else list(_ROLES.values())
        return [self._losses[stage] for stage in wanted if stage in self._losses]

    @cached_property
    def _losses(self) -> dict[str, dict[str, list[_Loss]]]:
        """Losses of the updates, by stage."""
        found = self.step.findings
        return {stage: losses(found[stage]) for stage in _ROLES.values() if stage in found}

    def _of_key_data(self, name: str, size: float) -> float | None:
        names = next((names for known, names in _KEY_DATA if known.search(name)), ())
        found = [self._joined(one) for one in names]
        moved = [_largest(one) for one in found if one is not None]
        if not moved and _RETURNS.search(name):  # without a critic, of rewards and as advantages
            given = [self._joined(one) for one in (keydata.REWARDS, keydata.ADVANTAGES)]
            moved = [_largest(one) for one in given[1:] if one is not None]
            moved += [_sum(b, t) for one in given[:1] if one is not None for _, b, t in one.pairs]
        return max(moved) if moved else None

    def _of_sums(self, name: str, size: float) -> float | None:
        rewards = self._joined(keydata.REWARDS)
        if not _SUMS.search(name) or rewards is None:
            return None
        return max(_sum(b, t) for _, b, t in rewards.pairs)

    def _of_ratios(self, name: str, size: float) -> float | None:
        log_probs = self._joined("old_log_probs")
        if not _RATIOS.search(name) or log_probs is None:
            return None
        longest = max(len(b) for _, b, _ in log_probs.pairs)
        return 2.0 * longest * _largest(log_probs) * max(size, 1.0)

    def _of_variance(self, name: str, size: float) -> float | None:
        values, returns = (self._joined(f"given_{name}") for name in ("values", "returns"))
        if not _EXPLAINED.search(name) or values is None or returns is None:
            return None
        own = {key: b for key, b, _ in values.pairs}
        pairs = [
            (own[key], b) for key, b, _ in returns.pairs if key in own and len(own[key]) == len(b)
        ]
        if len(pairs) != len(returns.pairs):
            return None
        whole = np.concatenate([r for _, r in pairs])
        rest = np.concatenate([r - v for v, r in pairs])
        shares = [
            (_largest(returns) + moved) / deviation if deviation > 0 else math.inf
            for deviation, moved in ((rest.std(), _largest(values)), (whole.std(), 0.0))
        ]
        if max(shares) > _UNKNOWN:
            return None
        return float((1.0 + size) * ((1.0 + shares[0]) ** 2 / (1.0 - shares[1]) ** 2 - 1.0))

    def _joined(self, name: str) -> Difference | None:
        """Key data of which every row has its partner, all of them finite."""
        found = self.step.key_data.get(name)
        if found is None or not found.pairs or len(found.pairs) != found.joined:
            return None
        lone = found.benchmark_only or found.target_only or any(found.lopsided)
        return None if lone or found.both_nonfinite else found


def _largest(found: Difference) -> float:
    """Of any value, and what a mean of all of them is rounded by."""
    size = max((float(np.abs(b).max(initial=0.0)) for _, b, _ in found.pairs), default=0.0)
    return found.max_abs + _MEAN * FP32 * size


def _sum(benchmark: keydata.Array, target: keydata.Array) -> float:
    size = float(np.abs(benchmark).sum())
    return float(np.abs(target - benchmark).sum()) + _MEAN * FP32 * size


#: Value on the benchmark and the target, floor, and whether it is judged.
_Loss = tuple[float | None, float | None, float | None, bool]


def losses(finding: Finding) -> dict[str, list[_Loss]]:
    """The loss records of a stage, by the name that a loss has."""
    # a scalar tensor is its own mean
    sides = [
        pl.coalesce(pl.col(f"value_{side}").cast(pl.Float64, strict=False), f"mean_{side}")
        for side in ("benchmark", "target")
    ]
    rows = finding.stage.rows.filter(pl.col("phase") == execution.LOSS)
    called = pl.col("name").str.extract(_LOSS.pattern, 1)
    found: dict[str, list[_Loss]] = {}
    for name, *row in rows.select(called, *sides, "floor", "judged").iter_rows():
        if name is not None:
            found.setdefault(name, []).append(tuple(row))
    return found


def _of_metric(known: Mapping[str, list[_Loss]], metric: str) -> list[_Loss]:
    """The losses that a metric is the mean or the sum of."""
    wanted = sorted({metric.replace("/", "_"), metric.rpartition("/")[2]})
    return [row for name in wanted for row in known.get(name, ())]


def _moved(
    value: float | None, other: float | None, floor: float | None, judged: bool
) -> float | None:
    """What a loss differs by, or may; None where it was not judged."""
    if value is None or other is None or not judged:
        return None
    own = floor * abs(value) if floor is not None and math.isfinite(floor) else 0.0
    return max(abs(other - value), own) + _MEAN * FP32 * max(abs(value), 1.0)
