"""What judging found: each stage of a judged step, and where it parts."""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from rlprobe import stages
from rlprobe.judge.buffers import Buffers
from rlprobe.judge.handed_on import Dropped
from rlprobe.judge.keydata import Difference
from rlprobe.judge.optimizers import Told
from rlprobe.judge.origin import Origin
from rlprobe.judge.outcomes import Outcome
from rlprobe.judge.reasons import PADDING_ONLY
from rlprobe.judge.stage import Stage

#: Kind of an origin that is a result of a stage while all its modules agree.
OUTCOME = "outcome"

#: Rows that are held against their floor; parameters are the gate's.
HELD = pl.col("judged") & (pl.col("slot") != "parameters")


@dataclass(frozen=True)
class Finding:
    """One stage, judged."""

    stage: Stage
    #: Its key data on both sides.
    key_data: list[Difference]
    outcomes: list[Outcome]
    #: Those of them that are key data and no records.
    produced: list[Outcome]
    #: Where it parts first, and on which rank; None where it agrees.
    origin: Origin | None
    rank: int | None
    #: What it was given, held against what that was made from.
    given: list[Outcome] = field(default_factory=list)
    #: What its optimizers were told on both sides; None where a side does not say.
    told: Told | None = None
    #: What its model kept beside its parameters, on both sides; None where a side does not say.
    buffers: Buffers | None = None

    @property
    def records(self) -> int:
        """How many records and results are held against their floor."""
        held = pl.col("judged") & pl.col("error").is_not_null()
        rows = int(self.stage.rows.select(held.sum()).item())
        return rows + len(self.produced) + len(self.given)

    @property
    def beyond(self) -> int:
        """How many records are beyond their floor."""
        return int(self.stage.rows.select((HELD & pl.col("beyond")).sum()).item())

    @property
    def unused(self) -> int:
        """How many differ only where no result looks (padding); not among :attr:`records`."""
        return self.padding_only.height

    @property
    def confined(self) -> bool:
        """Whether all that differs beyond its floor reaches no result."""
        return self.unused > 0

    @property
    def padding_only(self) -> pl.DataFrame:
        """The records that differ only where no result looks."""
        return self.stage.rows.filter((pl.col("excused_by") == PADDING_ONLY).fill_null(False))


@dataclass
class Step:
    """A judged step of the target's comparison: the first captured one, or each that was joined."""

    number: int
    findings: dict[str, Finding] = field(default_factory=dict)
    #: Key data of every name on both sides.
    key_data: dict[str, Difference] = field(default_factory=dict)
    #: Key data of dumps that could not be compared, and why (:data:`reasons.UNJUDGED`).
    absent: dict[str, str] = field(default_factory=dict)
    #: Results that differ nowhere but where they are handed to nobody.
    dropped: list[Dropped] = field(default_factory=list)


def first_of(step: Step) -> Finding | None:
    """The first stage, in the order of a step, that parts."""
    for name in sorted(step.findings, key=stages.order):
        finding = step.findings[name]
        if finding.origin is not None:
            return finding
    return None
