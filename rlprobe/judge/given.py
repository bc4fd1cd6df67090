"""Whether an update was given other numbers than the stages before it computed, or handed on.

A stage that computes rightly from wrong inputs is not at fault. What an update is given (old and
reference log-probs, values, returns, masks) is key data of its own; a difference there that is
larger than the difference of what it was made from came in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlprobe import stages
from rlprobe.judge import keydata
from rlprobe.judge.keydata import Difference
from rlprobe.judge.outcomes import SINGLE_VALUE, Outcome, nearer
from rlprobe.said import NOTHING_SAID, Said, say

#: A copy differs as what it is a copy of, but may be of a part of it (the response without the
#: prompt), whose relative difference is another.
_COPIED = 10.0
_LEAST = 1e-6
#: Advantages and returns are whitened or summed from values and log-probs, whose noise they
#: magnify.
_MAGNIFIED, _MAGNIFIED_LEAST = 100.0, 1e-5
_SOURCES = ("values", "old_log_probs", "ref_log_prob", "ref_log_probs")
#: slime's, which no stage but the update is given.
_RETURNS = "returns"
#: What generation said of its tokens: of the rollouts, which both sides replay.
_REPLAYED = "rollout_log_probs"


@dataclass(frozen=True)
class Wrong:
    """Something given to an update that differs by more than its sources explain."""

    difference: Difference
    allowed: float
    #: The same of the value that is farthest off.
    allowed_peak: float = math.inf

    @property
    def is_beyond(self) -> bool:
        """Whether all values together, or one of them, differ by more, or one side's alone are not
        finite."""
        d = self.difference
        return (d.error or 0.0) > self.allowed or d.peak > self.allowed_peak or any(d.lopsided)

    @property
    def outcome(self) -> Outcome:
        """What was given, measured."""
        d = self.difference
        whole = Outcome(
            d.name, d.error or 0.0, self.allowed, max(d.lopsided), _side(d), d.count
        )  # fmt: skip
        return nearer(whole, d.peak, self.allowed_peak)

    @property
    def is_mask(self) -> bool:
        return self.difference.name.endswith("_mask")

    @property
    def is_handed(self) -> bool:
        """Whether it is what a stage handed back, and not what it was given."""
        return self.difference.name in keydata.HANDED

    @property
    def said(self) -> Said:
        """Evidence in a sentence."""
        d = self.difference
        if self.is_handed:
            return self._handed_back()
        plain = d.name.removeprefix("given_").replace("_", " ")
        if self.is_mask:
            return say(
                "the {plain} that the update was given differs at {share:.1%} of its "
                "positions, first in sample {sample}",
                plain=plain,
                share=d.share,
                sample=d.sample,
            )
        if any(d.lopsided):
            return say(
                "the {plain} that the update was given are not finite at {lopsided:,} of "
                "{count:,} values on one side only; first in sample {sample}",
                plain=plain,
                lopsided=max(d.lopsided),
                count=d.count,
                sample=d.sample,
            )
        own = self.outcome
        if own.measure == SINGLE_VALUE:
            return say(
                "one of the {plain} that the update was given differs by {error:.3g} of its size, "
                "and what it comes from by {allowed:.2g} at most; in sample {sample}",
                plain=plain,
                error=own.error,
                allowed=own.floor,
                sample=d.peak_sample or d.sample,
            )
        displaced = NOTHING_SAID
        if d.shift is not None:
            displaced = say(", displaced by {shift} along the sequence", shift=d.shift)
        return say(
            "the {plain} that the update was given differ by {error:.3g}, and what "
            "they come from by {allowed:.2g} at most{displaced}; most in sample "
            "{sample}",
            plain=plain,
            error=d.error,
            allowed=self.allowed,
            displaced=displaced,
            sample=d.sample,
        )

    def _handed_back(self) -> Said:
        d, own = self.difference, self.outcome
        plain = d.name.removeprefix("handed_").replace("_", " ")
        if any(d.lopsided):
            return say(
                "the {plain} that the stage handed back are not finite at {lopsided:,} of "
                "{count:,} values on one side only; first in sample {sample}",
                plain=plain,
                lopsided=max(d.lopsided),
                count=d.count,
                sample=d.sample,
            )
        if own.measure == SINGLE_VALUE:
            return say(
                "one of the {plain} that the stage handed back differs by {error:.3g} of its size, "
                "and what it is made from by {allowed:.2g} at most; in sample {sample}",
                plain=plain,
                error=own.error,
                allowed=own.floor,
                sample=d.peak_sample or d.sample,
            )
        return say(
            "the {plain} that the stage handed back differ by {error:.3g}, and those that it "
            "computed by {allowed:.2g} at most; most in sample {sample}",
            plain=plain,
            error=d.error,
            allowed=self.allowed,
            sample=d.sample,
        )


def wrong(found: dict[str, Difference], stage: str) -> list[Wrong]:
    """What a stage was given wrongly, masks first.

    Args:
        found: differences of key data by name.
        stage: canonical name of an update stage.
    """
    beyond = [item for item in _joined(found, stage) if item.is_beyond]
    return sorted(beyond, key=lambda item: not item.is_mask)


def outcomes(found: dict[str, Difference], stage: str) -> list[Outcome]:
    """What a stage was given, held against what its sources explain.

    Left out is what has no source among the key data: nothing says by how much it may differ.

    Args:
        found: differences of key data by name.
        stage: canonical name.
    """
    return [
        item.outcome
        for item in _joined(found, stage)
        if item.is_mask or _has_source(found, item.difference.name)
    ]


def _side(difference: Difference) -> str | None:
    benchmark, target = difference.lopsided
    if not benchmark and not target:
        return None
    return "target" if target >= benchmark else "benchmark"


def _joined(found: dict[str, Difference], stage: str) -> list[Wrong]:
    """What a stage was given and could be joined, with what it may differ by."""
    known = keydata.GIVEN | keydata.HANDED
    names = [name for name, (_, owner) in known.items() if owner == stage]
    if stage == stages.ACTOR_UPDATE:
        names += [keydata.ADVANTAGES, _RETURNS]
    if stage == stages.LOG_PROB:
        names.append(_REPLAYED)
    return [
        Wrong(found[name], *(_allowed(found, name, of) for of in (_whole, _farthest)))
        for name in names
        if name in found and found[name].joined and found[name].error is not None
    ]


def _has_source(found: dict[str, Difference], name: str) -> bool:
    copied = _copied(name)
    return name == _REPLAYED or any(
        source in found for source in ((copied,) if copied is not None else _SOURCES)
    )


def _copied(name: str) -> str | None:
    """What key data are a copy of."""
    return (keydata.GIVEN | keydata.HANDED).get(name, (None, ""))[0]


def _whole(difference: Difference) -> float:
    return difference.error or 0.0


def _farthest(difference: Difference) -> float:
    return difference.peak


def _allowed(
    found: dict[str, Difference], name: str, measured: Callable[[Difference], float]
) -> float:
    """The difference that its sources explain.

    Args:
        found: differences of key data by name.
        name: what was given.
        measured: by which of its numbers a difference is told.
    """
    if name.endswith("_mask"):
        return 0.0
    if name == _REPLAYED:
        return _LEAST
    copied = _copied(name)
    if copied is not None:
        source = found.get(copied)
        return max(_LEAST, _COPIED * (measured(source) if source is not None else 0.0))
    return magnified(found, measured)


def magnified(
    found: dict[str, Difference], measured: Callable[[Difference], float] = _whole
) -> float:
    """What the differences of values and log-probs can make of advantages and returns."""
    given = [measured(found[name]) for name in _SOURCES if name in found]
    return max(_MAGNIFIED_LEAST, _MAGNIFIED * max(given, default=0.0))
