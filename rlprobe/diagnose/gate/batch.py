"""Rewards and advantages: both sides learn the same from each sample."""

from __future__ import annotations

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate.evidence import Evidence, Shut, caveat, opened, shut
from rlprobe.judge import given, keydata
from rlprobe.judge.keydata import Difference
from rlprobe.said import COMMA, Said, joined, say

REWARDS, ADVANTAGES, INPUTS = "rewards", "advantages", "batch inputs"
#: Rewards are copied, or computed from text: they agree to the last bits of fp32.
_EXACT = 1e-6


def check(evidence: Evidence) -> tuple[list[GateItem], Shut | None]:
    """Items ``rewards``, ``advantages`` and ``batch inputs``."""
    found = evidence.step.key_data
    difference = found.get(keydata.REWARDS) or found.get(keydata.SAMPLE_REWARDS)
    if difference is not None:
        recomputed = bool(evidence.target.manifest.declared.get("recompute_rewards"))
        rewards, closed = _rewards(
            difference,
            say("rewards (recomputed by the target)") if recomputed else say("rewards (replayed)"),
        )
    else:
        rewards, closed = _unseen(evidence), None
    inputs = _inputs(found)
    items = [rewards, _advantages(found)]
    return ([*items, inputs] if inputs is not None else items), closed


def of_dumps(found: dict[str, Difference]) -> tuple[list[GateItem], Shut | None]:
    """The same items, those of which two dumps hold key data."""
    items, closed = [], None
    difference = found.get(keydata.REWARDS) or found.get(keydata.SAMPLE_REWARDS)
    if difference is not None:
        rewards, closed = _rewards(difference, say("rewards"))
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
            say("rewards are replayed from the benchmark's rollouts; no key data shows them"),
        )
    return caveat(
        REWARDS,
        say("rewards are not among the key data of both sides"),
        say("capture key data (capture.key_data) to compare rewards sample by sample"),
    )


def _rewards(difference: Difference, what: Said) -> tuple[GateItem, Shut | None]:
    """Of rewards on both sides, called ``what``."""
    lost = difference.benchmark_only + difference.target_only
    if not difference.joined:
        return caveat(
            REWARDS,
            say("none of {lost} rows of rewards could be joined by sample", lost=lost),
            say("keep the mock proof of both sides: it says which row is which sample"),
        ), None
    alone = max(difference.lopsided)
    if alone or (difference.error is not None and difference.error > _EXACT):
        said = (
            say(
                "{what} are not finite at {alone:,} of {count:,} values on one side only",
                what=what,
                alone=alone,
                count=difference.count,
            )
            if alone
            else say(
                "{what} differ by {error:.3g} (relative L2), at most {max_abs:.3g}, over "
                "{joined} samples",
                what=what,
                error=difference.error,
                max_abs=difference.max_abs,
                joined=difference.joined,
            )
        )
        closed = Shut(
            "data",
            REWARDS,
            stages.ACTOR_UPDATE,
            0,
            None,
            difference.sample,
            {},
            {},
            [said, say("largest in sample {sample}", sample=difference.sample)],
        )
        return shut(
            REWARDS,
            say("{said}; largest in sample {sample}", said=said, sample=difference.sample),
            say(
                "find out why the reward of this sample differs, or replay rewards "
                "(recompute_rewards: false)"
            ),
        ), closed
    return opened(
        REWARDS, say("{what}: the same for {joined} samples", what=what, joined=difference.joined)
    ), None


def _advantages(found: dict[str, Difference]) -> GateItem:
    difference = found.get(keydata.ADVANTAGES)
    if difference is None:
        return caveat(
            ADVANTAGES,
            say("advantages are not among the key data of both sides"),
            say("capture key data (capture.key_data) to compare advantages sample by sample"),
        )
    if not difference.joined or difference.error is None:
        return caveat(
            ADVANTAGES,
            say("no row of advantages could be joined by sample"),
            say("keep the mock proof of both sides: it says which row is which sample"),
        )
    allowed = given.magnified(found)
    if difference.error > allowed:
        return caveat(
            ADVANTAGES,
            say(
                "advantages differ by {error:.3g} (relative L2), more than values and "
                "log-probs explain ({allowed:.3g}); largest in sample {sample}",
                error=difference.error,
                allowed=allowed,
                sample=difference.sample,
            ),
            say(
                "see whether values or log-probs already part; if not, compare the "
                "advantage estimator's settings"
            ),
        )
    if not difference.error:
        said = say("the same for {joined} samples", joined=difference.joined)
        return opened(ADVANTAGES, said)
    return opened(
        ADVANTAGES,
        say(
            "differ by {error:.3g} (relative L2) for {joined} samples, of which values and "
            "log-probs explain {allowed:.3g}",
            error=difference.error,
            joined=difference.joined,
            allowed=allowed,
        ),
    )


def _inputs(found: dict[str, Difference]) -> GateItem | None:
    """Tokens and masks as the log-prob stage got them, position by position."""
    seen = [found[name] for name in (*keydata.TOKENS, keydata.LOSS_MASK) if name in found]
    if not seen:
        return None
    wrong = [d for d in seen if d.joined and d.error]
    if wrong:
        names = joined(
            (
                say(
                    "{name} ({share:.1%} of positions, first in sample {sample})",
                    name=d.name,
                    share=d.share,
                    sample=d.sample,
                )
                for d in wrong
            ),
            COMMA,
        )
        return caveat(
            INPUTS,
            say("the log-prob stage was given other inputs: {names}", names=names),
            say("compare padding, truncation and the construction of masks and positions"),
        )
    count = min((d.joined for d in seen), default=0)
    return opened(
        INPUTS,
        say(
            "{what}: the same for {joined} samples",
            what=joined((d.name for d in seen), COMMA),
            joined=count,
        ),
    )
