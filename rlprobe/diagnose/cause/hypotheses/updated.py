"""Parameters change otherwise although their gradients agree."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Changes
from rlprobe.diagnose.cause.hypotheses import factor
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.diagnose.cause.measure import times


class Optimizer:
    """Gradients agree up to and after clipping, and changes do not."""

    needs = Changes

    def fit(self, difference: Changes) -> Fit | None:
        """What differs, and by one factor or not."""
        beyond = difference.rows
        said = [f"{beyond.height} of {difference.total} parameters changed otherwise"]
        if beyond.is_empty():
            said = ["parameters changed otherwise: what runs on the weights that it left says so"]
        if difference.unmoved:
            said.append(f"{difference.unmoved} did not change at all on the target")
        found = factor.common(beyond)
        if found is not None:
            said.append(
                f"{found.of_what('changes that differ')} are {times(found.factor)} times the "
                "benchmark's: another learning rate, or another correction of the first steps"
            )
        return Fit("optimizer", tuple(said))
