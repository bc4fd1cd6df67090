"""Disturb a sample of what a target recorded, one quantity at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from rlprobe.diagnose.diagnosis import ALIGNED, Diagnosis
from rlprobe.errors import UsageError
from rlprobe.judge.inputs import Results, require
from rlprobe.roles import TARGET
from rlprobe.selftest.blind import quantities, score
from rlprobe.selftest.blind.disturb import UnchangedError
from rlprobe.selftest.blind.laboratory import Laboratory
from rlprobe.selftest.blind.quantities import TEN_FLOORS, Quantity
from rlprobe.selftest.blind.score import Sensitivity, Trial
from rlprobe.selftest.catalogue import Case

_log = logging.getLogger(__name__)
#: A line of progress after this many disturbances.
_EVERY = 100


def one_of_each_kind(cases: Sequence[Case]) -> list[Case]:
    """A benign change for every kind of alignment that there is one for."""
    kinds: dict[str, Case] = {}
    for case in cases:
        if case.declared.is_benign:
            kinds.setdefault(repr(sorted(case.declared.needs.items())), case)
    return list(kinds.values())


def disturbed(results: Path, directory: Path, count: int | None, seed: int = 1) -> Sensitivity:
    """Disturb and judge again.

    Args:
        results: a finished alignment whose verdict is "aligned", with its judged tables.
        directory: where the copy goes; emptied first.
        count: disturbances; each kind, stage, slot, micro-batch, step and rank comes first. None:
            all that there are.
        seed: of the sample.

    Raises:
        UsageError: the alignment is not aligned.
        DumpError, StoreError: it is damaged.
    """
    quiet = logging.getLogger("rlprobe.compare")
    laboratory = Laboratory(results, directory)
    before = laboratory.judged()
    if before.verdict != ALIGNED:
        raise UsageError(
            f"{results}: the verdict is {before.verdict}; only an alignment that is aligned can be "
            "disturbed, since the verdict must change"
        )
    laboratory.require_neutral(before)
    copy = Results.open(laboratory.results)
    found = quantities.of(copy, require(copy, TARGET), before.extent, before.curves)
    chosen = quantities.sample(found, count, seed)
    _log.info("%d quantities, %d disturbances", len(found), len(chosen))
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    trials = []
    try:
        for number, (quantity, way) in enumerate(chosen, 1):
            trials.append(trial(laboratory, before, quantity, way))
            if number % _EVERY == 0:
                silent = sum(trial.outcome == score.SILENT for trial in trials)
                _log.info("%d of %d: %d silent", number, len(chosen), silent)
    finally:
        quiet.setLevel(level)
    return Sensitivity(trials)


def trial(laboratory: Laboratory, before: Diagnosis, quantity: Quantity, way: str) -> Trial:
    """Disturb one quantity in one way; by ten times the floor that it has once it differs.

    Args:
        laboratory: of the alignment.
        before: its diagnosis.
        quantity: what is disturbed.
        way: how, of :data:`quantities.WAYS`.
    """
    try:
        after = laboratory.with_disturbed(quantity, way)
        outcome, why = _outcome(before, after, quantity, way)
        wider = laboratory.floor(quantity) if outcome == score.SILENT else None
        if way == TEN_FLOORS and wider is not None and wider > (quantity.floor or 0.0):
            # what is equal on both sides has the floor of a digest; what differs, that of its depth
            quantity = dataclasses.replace(quantity, floor=wider)
            after = laboratory.with_disturbed(quantity, way)
            outcome, why = _outcome(before, after, quantity, way)
    except UnchangedError:
        outcome, why = score.NOTHING, ""
    return Trial(quantity.kind, quantity.stage, quantity.name, way, outcome, why)


def _outcome(
    before: Diagnosis, after: Diagnosis | str, quantity: Quantity, way: str
) -> tuple[str, str]:
    below = quantities.is_below(quantity, way)
    return score.outcome(before, after, quantity.declared, below=below)
