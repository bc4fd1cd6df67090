"""Which call ran inside which, where the dumps say so themselves (construct.json).

Without it the nesting of calls is told by their order and paths (:mod:`rlprobe.judge.execution`),
which cannot tell of a function whether a module or the code after it called it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.errors import RlprobeError
from rlprobe.judge.inputs import Results

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told:
    """What one process's dump says."""

    #: The side that says it, whose names these are.
    side: str
    #: The call around each call, None where there was none.
    around: Mapping[str, str | None]


def of(results: Results, stage: str, step: int) -> dict[int, Told]:
    """By rank, what a comparison's dumps say of a step; the benchmark's where both do.

    Empty of an alignment: its runs record modules, whose nesting order and paths tell.
    """
    try:
        plans = results.plans()
    except RlprobeError as error:
        _log.warning("which module made a call is told by their order alone: %s", error)
        return {}
    # two directories that were pointed at are one stage, whatever it was called
    own = plans if len(plans) == 1 else [plan for plan in plans if plan.stage == stage]
    found = {}
    for plan in own:
        for pairing in plan.pairings:
            told = _told(plan, pairing) if pairing.step == step else None
            if told is not None:
                found[pairing.rank] = told
    return found


def _told(plan: StagePlan, pairing: Pairing) -> Told | None:
    for side, source, process in (
        ("benchmark", plan.benchmark, pairing.benchmark),
        ("target", plan.target, pairing.target),
    ):
        if source is None or process is None:
            continue
        try:
            around = source.construct(process)
        except RlprobeError as error:
            _log.warning("which module made a call is told by their order alone: %s", error)
            continue
        if around:
            return Told(side, around)
    return None
