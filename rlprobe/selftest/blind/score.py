"""What became of each disturbance, and how sensitive the judgement is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlprobe.diagnose.diagnosis import OPEN
from rlprobe.judge import extent
from rlprobe.selftest.blind.laboratory import Judgement

#: The verdict or a gate item changed; the diagnosis counts it as not judged now, or a caveat says
#: something else; it had said before that it is not judged; nothing was changed; less than
#: round-off was (a zero for what is smaller than its floor); nothing was said.
NOTICED, SAID, DECLARED, NOTHING, BELOW, SILENT = (
    "noticed",
    "said",
    "declared",
    "nothing",
    "below",
    "silent",
)
OUTCOMES = (NOTICED, SAID, DECLARED, SILENT, BELOW, NOTHING)


@dataclass(frozen=True)
class Trial:
    """One quantity, disturbed in one way."""

    kind: str
    stage: str | None
    name: str
    way: str
    outcome: str
    #: What was said of it, or why it is not judged.
    why: str = ""


def outcome(
    before: Judgement, after: Judgement | str, declared: str | None, *, below: bool = False
) -> tuple[str, str]:
    """What became of a disturbance, and the reason.

    Args:
        before: of the alignment as it was.
        after: with the quantity disturbed, or the error that judging ended in.
        declared: why ``before`` says that the quantity is not judged; None where it is.
        below: the disturbance is smaller than the quantity's floor.
    """
    if isinstance(after, str):
        return NOTICED, after
    if after.verdict != before.verdict:
        return NOTICED, f"{after.verdict}: {after.why}"
    changed = sorted({(item.item, item.state) for item in after.gate}
                     - {(item.item, item.state) for item in before.gate})  # fmt: skip
    if changed:
        return NOTICED, ", ".join(f"{item}: {state}" for item, state in changed)
    left, right = (extent.total(one.extent) for one in (before, after))
    # fewer that are judged, and nothing among the unjudged: what is gone is said nowhere
    more = _said_more(before, after)
    if more:
        return SAID, more
    if (left.excused, left.unjudged) != (right.excused, right.unjudged):
        return SAID, f"judged {right.judged} of {right.recorded}, before {left.judged}"
    if declared is not None:
        return DECLARED, declared
    return (BELOW, "less than its floor") if below else (SILENT, "")


def _said_more(before: Judgement, after: Judgement) -> str:
    """The items of the gate that were caveats already, and say something else now."""
    known = {item.item: item.evidence for item in before.gate if item.state != OPEN}
    return ", ".join(
        f"{item.item} says more"
        for item in after.gate
        if item.item in known and item.evidence != known[item.item]
    )


@dataclass
class Sensitivity:
    """All trials of one alignment."""

    trials: list[Trial] = field(default_factory=list)
    #: What judging only the touched part said otherwise than judging everything: a fault of the
    #: laboratory.
    unlike: list[str] = field(default_factory=list)

    def outcomes(self) -> dict[str, int]:
        """How many disturbances ended as each outcome: samples of several seeds add up."""
        counted = Counter(trial.outcome for trial in self.trials)
        return {name: counted[name] for name in OUTCOMES}

    def shares(self) -> dict[str, float]:
        """Share of each outcome among the disturbances that changed something."""
        counted = self.outcomes()
        names = (NOTICED, SAID, DECLARED, SILENT)
        total = sum(counted[name] for name in names) or 1
        return {name: counted[name] / total for name in names}

    def reasons(self) -> dict[str, int]:
        """How many disturbances each reason took that was declared."""
        return dict(Counter(t.why for t in self.trials if t.outcome == DECLARED).most_common())

    @property
    def silent(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.outcome == SILENT]

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "trials": len(self.trials),
            "outcomes": self.outcomes(),
            "shares": self.shares(),
            "silent": [vars(trial) for trial in self.silent],
            "unlike": self.unlike,
            "declared": self.reasons(),
        }


def render(name: str, found: Sensitivity, seconds: float) -> str:
    """A table: kinds and ways by outcome, then what was silent."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for trial in found.trials:
        rows.setdefault((trial.kind, trial.way), Counter())[trial.outcome] += 1
    lines = [
        f"{name}: {len(found.trials)} disturbances in {seconds:.0f} s",
        f"{'quantity':<12}{'disturbed':<16}" + "".join(f"{o:>10}" for o in OUTCOMES),
    ]
    for (kind, way), counts in sorted(rows.items()):
        lines.append(f"{kind:<12}{way:<16}" + "".join(f"{counts[o]:>10}" for o in OUTCOMES))
    shares = found.shares()
    lines.append(", ".join(f"{o} {shares[o]:.1%}" for o in (NOTICED, SAID, DECLARED, SILENT)))
    declared = ", ".join(f"{count} {why}" for why, count in found.reasons().items())
    lines += [f"declared: {declared}"] if declared else []
    lines += [f"SILENT: {t.kind} {t.name} {t.way}" for t in found.silent[:20]]
    more = len(found.silent) - 20
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def shortfalls(found: Sequence[Sensitivity]) -> list[str]:
    """What is not as it has to be: nothing silent, 95 % noticed or said of what is judged."""
    silent = sum(len(one.silent) for one in found)
    unlike = [name for one in found for name in one.unlike]
    short = [f"{silent} disturbances were silent"] if silent else []
    if unlike:
        short.append(
            f"{len(unlike)} disturbances are judged otherwise as a whole, first {unlike[0]}"
        )
    return short
