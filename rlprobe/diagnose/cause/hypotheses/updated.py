"""Parameters change otherwise although their gradients agree."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Changes
from rlprobe.diagnose.cause.hypotheses import factor
from rlprobe.diagnose.cause.hypothesis import Fit
from rlprobe.diagnose.cause.measure import about
from rlprobe.said import say


class Optimizer:
    """Gradients agree up to and after clipping, and changes do not."""

    needs = Changes

    def fit(self, difference: Changes) -> Fit | None:
        """What differs, and by one factor or not."""
        beyond = difference.rows
        said = [
            say(
                "{count} of {total} parameters changed otherwise",
                count=beyond.height,
                total=difference.total,
            )
            if difference.update is None
            else say(
                "{count} of {total} parameters changed otherwise in update {update}",
                count=beyond.height,
                total=difference.total,
                update=difference.update,
            )
        ]
        if beyond.is_empty():
            said = [
                say("parameters changed otherwise: what runs on the weights that it left says so")
            ]
        if difference.unmoved:
            said.append(
                say("{count} did not change at all on the target", count=difference.unmoved)
            )
        found = factor.common_norm(beyond)
        if found is not None:
            said.append(
                say(
                    "{every} are about {factor} times the benchmark's: another learning rate, or "
                    "another correction of the first steps",
                    every=found.of_what(say("changes that differ")),
                    factor=about(found.factor, factor.ONE),
                )
            )
        return Fit("optimizer", tuple(said))
