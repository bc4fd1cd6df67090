"""Log-probs of another temperature: d log p / d log(1 / T) is log p + entropy."""

from __future__ import annotations

from rlprobe.diagnose.cause.differences import Tokens
from rlprobe.diagnose.cause.hypothesis import Fit, by_chance
from rlprobe.diagnose.cause.measure import times
from rlprobe.judge import fits
from rlprobe.said import Said, say

#: Share of the difference's square that a temperature leaves at most, to first order.
LEAVES = 0.03
#: Names of log-probs.
LOG_PROBS = ("old_log_probs", "update_log_probs", "ref_log_prob", "ref_log_probs",
             "teacher_log_probs")  # fmt: skip


class OfTokens:
    """One temperature explains the log-probs of all tokens."""

    needs = Tokens

    def fit(self, difference: Tokens) -> Fit | None:
        """Fit the ratio of temperatures; only log-probs have one."""
        if difference.name not in LOG_PROBS:
            return None
        found = fitted(difference)
        count = sum(len(b) for b, _ in difference.values)
        if found is None or by_chance(count, 1.0 - found.explained):
            return None
        said = say(
            "{name} differ as they do where the target's temperature is {ratio} times "
            "the benchmark's (that explains {explained:.1%} of the difference to first "
            "order)",
            name=difference.name,
            ratio=_said(found),
            explained=found.explained,
        )
        errors = {} if found.error is None else {"temperature": found.error}
        return Fit(
            "sampling_semantics", (said,), (1.0 - found.explained) / LEAVES,
            {"temperature": found.coefficient}, errors,
        )  # fmt: skip


def fitted(difference: Tokens) -> fits.Fit | None:
    """The temperature that comes nearest, with entropies where they are known."""
    if difference.entropies is not None:
        return fits.temperature(difference.with_entropies, difference.entropies)
    return fits.temperature(difference.values, None)


def _said(found: fits.Fit) -> Said:
    """The fitted ratio, with what it is good to."""
    if found.error is None:
        return say("about {ratio} (a first-order estimate)", ratio=times(found.coefficient))
    if abs(found.coefficient - 1.0) < 1e-3:
        return times(found.coefficient)
    return say(
        "{ratio:.4g} (standard error {error:.1g})",
        ratio=found.coefficient,
        error=found.error,
    )
