"""The whole gate."""

from __future__ import annotations

from dataclasses import dataclass

from rlprobe.diagnose.diagnosis import SHUT, GateItem
from rlprobe.diagnose.gate import (
    batch,
    buffers,
    checkpoint,
    differing,
    engine_weights,
    extent,
    held,
    judged,
    lacking,
    precise,
    recorded,
    rejoined,
    rounded,
    routers,
    samples,
    settings,
    shapes,
    staleness,
    told,
    trainers,
    unused,
    weights,
)
from rlprobe.diagnose.gate.evidence import Evidence, Shut


@dataclass(frozen=True)
class Gate:
    """Every item, and what shut it first."""

    items: list[GateItem]
    #: What differs, where one item shut the gate and could name it.
    shut: Shut | None

    @property
    def is_shut(self) -> bool:
        """Whether no verdict on the numbers is possible."""
        return any(item.state == SHUT for item in self.items)


def check(evidence: Evidence) -> Gate:
    """Look at everything that must be the same on both sides.

    Raises:
        DumpError, StoreError: a file is damaged.
    """
    tokens, no_tokens = samples.check(evidence)
    weight, no_weights = weights.check(evidence)
    resumed = checkpoint.check(evidence)
    began, touched = rejoined.check(evidence)
    moved, stale = staleness.check(evidence)
    alike, other = held.check(evidence)
    replayed = routers.check(evidence)
    sent, not_sent = engine_weights.check(evidence)
    given, no_batch = batch.check(evidence)
    trainer = trainers.item(evidence)
    asked, no_settings = settings.check(evidence)
    stepped = told.check(evidence)
    constant = buffers.check(evidence)
    enough = extent.check(evidence)
    kept = judged.check(evidence)
    hidden = unused.check(evidence.step)
    unlike = recorded.check(evidence)
    shaped = shapes.check(evidence.step)
    coarse = rounded.check(evidence)
    excused = precise.check(evidence.step)
    lost = lacking.check(evidence)
    unsized = differing.check(evidence.step)
    return Gate(
        items=[
            *tokens,
            weight,
            *([resumed] if resumed is not None else []),
            *([began] if began is not None else []),
            *([moved] if moved is not None else []),
            *([alike] if alike is not None else []),
            *([replayed] if replayed is not None else []),
            *([sent] if sent is not None else []),
            *given,
            *([trainer] if trainer is not None else []),
            *asked,
            *([stepped] if stepped is not None else []),
            *([constant] if constant is not None else []),
            *enough,
            *([kept] if kept is not None else []),
            *([hidden] if hidden is not None else []),
            *([lost] if lost is not None else []),
            *([unlike] if unlike is not None else []),
            *([shaped] if shaped is not None else []),
            *([coarse] if coarse is not None else []),
            *([excused] if excused is not None else []),
            *([unsized] if unsized is not None else []),
        ],
        shut=no_tokens
        or no_weights
        or touched
        or stale
        or other
        or not_sent
        or no_batch
        or no_settings,
    )
