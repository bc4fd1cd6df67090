"""Who made a call, on either side: the call stacks that msprobe keeps in stack.json."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from rlprobe.compare.planner import Pairing, StagePlan
from rlprobe.compare.stage_sources import Process, StageSource
from rlprobe.dumps import construct
from rlprobe.errors import DumpError
from rlprobe.said import listed

_log = logging.getLogger(__name__)
#: Stage, side and process.
_Place = tuple[str, str, Process]

#: The call that a record is of: its name up to the direction, and a module's number after it.
_CALL = re.compile(r"^(.*\.(?:forward|backward)(?:\.\d+)?)(?:\.|$)")
#: Frames of torch's own machinery, which say nothing of who called.
_MACHINERY = re.compile(r"torch/nn/modules/module\.py")
_FRAME = re.compile(r"\n(?=File )")
#: Frames shown of a stack, innermost first.
FRAMES = 6
#: Files named that cannot be read: of a run of many processes all are likely to be alike.
_NAMED = 2


class Called:
    """Call stacks of what was compared: each file is read once.

    A file that is damaged costs nothing but what it holds; all that are are said by :meth:`tell`.
    """

    def __init__(self) -> None:
        self._stacks: dict[_Place, dict[str, str] | None] = {}
        self._around: dict[_Place, dict[str, str | None] | None] = {}
        self._damaged: list[str] = []

    def tell(self) -> None:
        """Say once of all files that could not be read since it was said last."""
        if self._damaged:
            _log.warning("%s; nothing of it is shown", listed(self._damaged, _NAMED))
        self._damaged.clear()

    def both(
        self, plan: Iterable[StagePlan], rows: Iterable[Mapping[str, Any]]
    ) -> dict[str, Sequence[str]]:
        """Lines about who made each record's call, by the record's name.

        Args:
            plan: what was compared with what.
            rows: of judged tables: stage, step, rank, name and both sides' names.

        Raises:
            StoreError: of a stored run, it is not what was committed.
        """
        found: dict[str, Sequence[str]] = {}
        stages = {stage.stage: stage for stage in plan}
        for row in rows:
            for stage in [stages[row["stage"]]] if row.get("stage") in stages else stages.values():
                said: list[str] = []
                for pairing in stage.pairings:
                    if (pairing.step, pairing.rank) == (row.get("step"), row.get("rank")):
                        said += self._of_pair(stage, pairing, row)
                if said:
                    found[str(row["name"])] = said
        return found

    def column(self, records: pl.DataFrame, stage: StagePlan) -> pl.Series:
        """The target's stack at the first record of each call, null elsewhere, as msprobe has it.

        Args:
            records: the stage's comparison, all processes.
            stage: what was compared with what.
        """
        stacks: dict[tuple[int, int], dict[str, str]] = {}
        source = stage.target
        for pairing in stage.pairings:
            if source is not None and pairing.target is not None:
                read = self._stacks_of(stage.stage, "target", source, pairing.target)
                stacks[pairing.step, pairing.rank] = read or {}
        seen: set[tuple[int, int, str]] = set()
        cells: list[str | None] = []
        for step, rank, name in records.select("step", "rank", "name_target").iter_rows():
            call = None if name is None else call_of(name)
            if call is None or (step, rank, call) in seen:
                cells.append(None)
                continue
            seen.add((step, rank, call))
            cells.append(stacks.get((step, rank), {}).get(call))
        return pl.Series("stack", cells, dtype=pl.String)

    def _of_pair(self, stage: StagePlan, pairing: Pairing, row: Mapping[str, Any]) -> list[str]:
        each: dict[str, list[str]] = {}
        for side, source, process in (
            ("benchmark", stage.benchmark, pairing.benchmark),
            ("target", stage.target, pairing.target),
        ):
            if source is None or process is None:
                continue
            call = call_of(str(row.get(f"name_{side}") or row.get("name")))
            stacks = self._stacks_of(stage.stage, side, source, process)
            stack = None if stacks is None else stacks.get(call)
            each[side] = (
                _frames(stack)
                if stack
                else _calls(
                    self._around_of(stage.stage, side, source, process), call, stacks is not None
                )
            )
        return _of_sides(each)

    def _stacks_of(
        self, stage: str, side: str, source: StageSource, process: Process
    ) -> dict[str, str] | None:
        place = (stage, side, process)
        if place not in self._stacks:
            try:
                self._stacks[place] = source.stacks(process)
            except DumpError as error:
                self._damaged.append(str(error))
                self._stacks[place] = None
        return self._stacks[place]

    def _around_of(
        self, stage: str, side: str, source: StageSource, process: Process
    ) -> dict[str, str | None] | None:
        place = (stage, side, process)
        if place not in self._around:
            try:
                self._around[place] = source.construct(process)
            except DumpError as error:  # who judges the records has said so (judge.nesting)
                _log.debug("%s", error)
                self._around[place] = None
        return self._around[place]


def call_of(name: str) -> str:
    """The name in stack.json of a record's call."""
    match = _CALL.match(name)
    return match[1] if match else name


def _of_sides(each: Mapping[str, list[str]]) -> list[str]:
    """What is said of either side, once where it is the same of both."""
    texts = list(each.values())
    if len(texts) > 1 and texts[0] == texts[1]:
        each = {"both sides": texts[0]}
    return [line for side, (first, *more) in each.items() for line in (f"{side}:{first}", *more)]


def _calls(told: Mapping[str, str | None] | None, call: str, stacks: bool) -> list[str]:
    """Without a stack, the calls of modules around it, where the dump tells of them.

    Args:
        told: which call ran in which; None where that cannot be read.
        stacks: whether the stacks can be.
    """
    none = " no stack was recorded" if stacks else " its stacks cannot be read"
    around = construct.around(told or {}, call)[:FRAMES]
    return [f"{none}; it ran in", *(f"  {outer}" for outer in around)] if around else [none]


def _frames(stack: str) -> list[str]:
    # a frame is two lines: where, and the code there
    frames = [frame for frame in _FRAME.split(stack) if not _MACHINERY.search(frame)]
    shown = [" ".join(frame.split()) for frame in frames[:FRAMES]]
    more = [f"  … {len(frames) - FRAMES} more frames"] if len(frames) > FRAMES else []
    return ["", *(f"  {frame}" for frame in shown), *more]
