"""Rewards and advantages: both sides learn the same from each sample."""

from __future__ import annotations

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.judge import given, keydata
from rlprobe.judge.keydata import Difference

REWARDS, ADVANTAGES, INPUTS = "rewards", "advantages", "batch inputs"
#: Rewards are copied, or computed from text: they agree to the last bits of fp32.
_EXACT = 1e-6


def check(evidence: Evidence) -> tuple[list[GateItem], Shut | None]:
    """Items ``rewards``, ``advantages`` and ``batch inputs``."""
    found = evidence.step.key_data
    difference = found.get(keydata.REWARDS)
    if difference is not None:
        recomputed = bool(evidence.target.manifest.declared.get("recompute_rewards"))
        rewards, closed = _rewards(
            difference, "rewards (recomputed by the target)" if recomputed else "rewards (replayed)"
        )
    else:
        rewards, closed = _unseen(evidence), None
    inputs = _inputs(found)
    items = [rewards, _advantages(found)]
    return ([*items, inputs] if inputs is not None else items), closed


def of_dumps(found: dict[str, Difference]) -> tuple[list[GateItem], Shut | None]:
    """The same items, those of which two dumps hold key data."""
    items, closed = [], None
    if keydata.REWARDS in found:
        rewards, closed = _rewards(found[keydata.REWARDS], "rewards")
        items.append(rewards)
    if keydata.ADVANTAGES in found:
        items.append(_advantages(found))
    inputs = _inputs(found)
    return ([*items, inputs] if inputs is not None else items), closed


def _unseen(evidence: Evidence) -> GateItem:
    """Of rewards that are not among the key data."""
    recomputed = bool(evidence.target.manifest.declared.get("recompute_rewards"))
    if not recomputed and evidence.benchmark.key in evidence.target.manifest.parents:
        return opened(
            REWARDS,
            "rewards are replayed from the benchmark's rollouts; no key data shows them",
        )
    return caveat(
        REWARDS,
        "rewards are not among the key data of both sides",
        "capture key data (capture.key_data) to compare rewards sample by sample",
    )


def _rewards(difference: Difference, what: str) -> tuple[GateItem, Shut | None]:
    """Of rewards on both sides, called ``what``."""
    lost = difference.benchmark_only + difference.target_only
    if not difference.joined:
        return caveat(
            REWARDS,
            f"none of {lost} rows of rewards could be joined by sample",
            "keep the mock proof of both sides: it says which row is which sample",
        ), None
    alone = max(difference.lopsided)
    if alone or (difference.error is not None and difference.error > _EXACT):
        said = (
            f"{what} are not finite at {alone:,} of {difference.count:,} values on one side only"
            if alone
            else f"{what} differ by {difference.error:.3g} (relative L2), at most "
            f"{difference.max_abs:.3g}, over {difference.joined} samples"
        )
        closed = Shut(
            "data", REWARDS, stages.ACTOR_UPDATE, 0, None, difference.sample,
            {}, {}, [said, f"largest in sample {difference.sample}"],
        )  # fmt: skip
        return shut(
            REWARDS,
            f"{said}; largest in sample {difference.sample}",
            "find out why the reward of this sample differs, or replay rewards "
            "(recompute_rewards: false)",
        ), closed
    return opened(REWARDS, f"{what}: the same for {difference.joined} samples"), None


def _advantages(found: dict[str, Difference]) -> GateItem:
    difference = found.get(keydata.ADVANTAGES)
    if difference is None:
        return caveat(
            ADVANTAGES,
            "advantages are not among the key data of both sides",
            "capture key data (capture.key_data) to compare advantages sample by sample",
        )
    if not difference.joined or difference.error is None:
        return caveat(
            ADVANTAGES,
            "no row of advantages could be joined by sample",
            "keep the mock proof of both sides: it says which row is which sample",
        )
    allowed = given.magnified(found)
    if difference.error > allowed:
        return caveat(
            ADVANTAGES,
            f"advantages differ by {difference.error:.3g} (relative L2), more than values and "
            f"log-probs explain ({allowed:.3g}); largest in sample {difference.sample}",
            "see whether values or log-probs already part; if not, compare the advantage "
            "estimator's settings",
        )
    return opened(
        ADVANTAGES,
        f"agree within {difference.error:.3g} (relative L2) for {difference.joined} samples",
    )


def _inputs(found: dict[str, Difference]) -> GateItem | None:
    """Tokens and masks as the log-prob stage got them, position by position."""
    seen = [found[name] for name in keydata.TOKENS if name in found]
    if not seen:
        return None
    wrong = [d for d in seen if d.joined and d.error]
    if wrong:
        names = ", ".join(
            f"{d.name} ({d.share:.1%} of positions, first in sample {d.sample})" for d in wrong
        )
        return caveat(
            INPUTS,
            f"the log-prob stage was given other inputs: {names}",
            "compare padding, truncation and the construction of masks and positions",
        )
    joined = min((d.joined for d in seen), default=0)
    return opened(INPUTS, f"{', '.join(d.name for d in seen)}: the same for {joined} samples")
