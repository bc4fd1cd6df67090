"""Disturb a sample of what a target recorded, one quantity at a time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from rlprobe.diagnose.diagnosis import ALIGNED
from rlprobe.errors import UsageError
from rlprobe.judge.reasons import UNHELD
from rlprobe.selftest.blind import beside, quantities, score, told
from rlprobe.selftest.blind.disturb import UnchangedError
from rlprobe.selftest.blind.laboratory import Judgement, Laboratory
from rlprobe.selftest.blind.quantities import TEN_FLOORS, Quantity
from rlprobe.selftest.blind.score import Sensitivity, Trial
from rlprobe.selftest.catalogue import Case

_log = logging.getLogger(__name__)
#: A line of progress after this many disturbances.
_EVERY = 100
#: One of this many is judged as a whole as well, to the same result.
_WHOLE = 50


def one_of_each_kind(cases: Sequence[Case]) -> list[Case]:
    """A benign change for every kind of alignment that there is one for."""
    kinds: dict[str, Case] = {}
    for case in cases:
        if case.declared.is_benign:
            kinds.setdefault(repr(sorted(case.declared.needs.items())), case)
    return list(kinds.values())


def disturbed(
    results: Path, directory: Path, count: int | None, seed: int = 1, jobs: int = 1
) -> Sensitivity:
    """Disturb and judge again.

    Args:
        results: a finished alignment whose verdict is "aligned", with its judged tables.
        directory: where the copy goes; emptied first.
        count: disturbances; each kind, stage, slot, micro-batch, step and rank comes first. None:
            all that there are.
        seed: of the sample.
        jobs: processes that share them, each with a copy of its own.

    Raises:
        UsageError: the alignment is not aligned.
        DumpError, StoreError: it is damaged.
    """
    laboratory = Laboratory(results, directory)
    before = laboratory.before
    if before.verdict != ALIGNED:
        raise UsageError(
            f"{results}: the verdict is {before.verdict}; only an alignment that is aligned can be "
            "disturbed, since the verdict must change"
        )
    laboratory.require_neutral()
    examined = laboratory.examined
    found = [*quantities.of(examined), *beside.of(examined), *told.of(examined.target)]
    chosen = quantities.sample(found, count, seed)
    _log.info("%d quantities, %d disturbances", len(found), len(chosen))
    if jobs == 1:
        return _all(laboratory, chosen)
    parts = [chosen[number::jobs] for number in range(jobs)]
    places = [directory / f"job{number}" for number in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(_part, [results] * jobs, places, parts))
    return Sensitivity(
        [t for one in done for t in one.trials], [u for one in done for u in one.unlike]
    )


def _part(results: Path, directory: Path, chosen: list[tuple[Quantity, str]]) -> Sensitivity:
    return _all(Laboratory(results, directory), chosen)


def _all(laboratory: Laboratory, chosen: Sequence[tuple[Quantity, str]]) -> Sensitivity:
    quiet = logging.getLogger("rlprobe.compare")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    found = Sensitivity()
    try:
        for number, (quantity, way) in enumerate(chosen):
            found.trials.append(trial(laboratory, quantity, way))
            if number % _WHOLE == 0 and not _is_alike(laboratory, quantity, way):
                found.unlike.append(f"{quantity.name} {way}")
            if number % _EVERY == _EVERY - 1:
                _log.info("%d of %d: %d silent", number + 1, len(chosen), len(found.silent))
    finally:
        quiet.setLevel(level)
    return found


def _is_alike(laboratory: Laboratory, quantity: Quantity, way: str) -> bool:
    """Whether judging only what was touched says what judging everything does."""
    try:
        part, whole = (
            laboratory.with_disturbed(quantity, way, whole=whole) for whole in (False, True)
        )
    except UnchangedError:
        return True
    return part == whole


def trial(laboratory: Laboratory, quantity: Quantity, way: str) -> Trial:
    """Disturb one quantity in one way; by ten times the floor that it has once it differs.

    Args:
        laboratory: of the alignment.
        quantity: what is disturbed.
        way: how, of :data:`quantities.WAYS`.
    """
    before = laboratory.before
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
    before: Judgement, after: Judgement | str, quantity: Quantity, way: str
) -> tuple[str, str]:
    below = quantities.is_below(quantity, way)
    declared = told.judges(quantity, way)
    if declared in UNHELD and declared not in before.unheld:
        declared = None  # the diagnosis had not said it
    return score.outcome(before, after, declared, below=below)
