"""Values displaced along their rows: what stands at a token is another token's."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Tokens
from rlprobe.diagnose.cause.hypothesis import Fit, by_chance
from rlprobe.judge import fits
from rlprobe.said import say

#: Displacements that :func:`fits.shift` tries.
_TRIED = 4


class OfTokens:
    """One displacement, the same in all rows."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """The displacement that explains the difference of all tokens."""
        places = fits.shift(difference.values)
        if places is None:
            return None
        count = sum(max(len(b) - abs(places), 0) for b, _ in difference.values)
        if by_chance(count, 1.0 - fits.EXPLAINED, _TRIED):
            return None
        said = say(
            "{name} are displaced along the sequence: what stands at a token is the "
            "benchmark's of {places} {which}",
            name=difference.name,
            places=abs(places),
            which=say("later") if places > 0 else say("earlier"),
        )
        return Fit("label_or_mask_shift", (said,), parameters={"places": float(places)})
