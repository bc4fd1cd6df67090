"""Who made a call, on either side: the call stacks that msprobe keeps in stack.json."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import polars as pl

from rlprobe.compare.planner import StagePlan
from rlprobe.compare.stage_sources import Process, StageSource
from rlprobe.dumps import construct
from rlprobe.errors import DumpError

_log = logging.getLogger(__name__)
_Said = TypeVar("_Said", str, str | None)

#: The call that a record is of: its name up to the direction, and a module's number after it.
_CALL = re.compile(r"^(.*\.(?:forward|backward)(?:\.\d+)?)(?:\.|$)")
#: Frames of torch's own machinery, which say nothing of who called.
_MACHINERY = re.compile(r"torch/nn/modules/module\.py")
_FRAME = re.compile(r"\n(?=File )")
#: Frames shown of a stack, innermost first.
FRAMES = 6


def both(plan: Iterable[StagePlan], rows: Iterable[Mapping[str, Any]]) -> dict[str, Sequence[str]]:
    """Lines about who made each record's call, by the record's name.

    Args:
        plan: what was compared with what.
        rows: of judged tables: stage, step, rank, name and both sides' names.

    A file that is damaged is said to be, and costs nothing but what it holds.

    Raises:
        StoreError: of a stored run, it is not what was committed.
    """
    known: dict[tuple[str, str, Process], dict[str, str]] = {}
    told: dict[tuple[str, str, Process], dict[str, str | None]] = {}
    found: dict[str, Sequence[str]] = {}
    stages = {stage.stage: stage for stage in plan}
    for row in rows:
        for stage in [stages[row["stage"]]] if row.get("stage") in stages else stages.values():
            said: list[str] = []
            for pairing in stage.pairings:
                if (pairing.step, pairing.rank) != (row.get("step"), row.get("rank")):
                    continue
                each: dict[str, list[str]] = {}
                for side, source, process in (
                    ("benchmark", stage.benchmark, pairing.benchmark),
                    ("target", stage.target, pairing.target),
                ):
                    if source is None or process is None:
                        continue
                    place = (stage.stage, side, process)
                    if place not in known:
                        known[place] = _read(source.stacks, process)
                    call = call_of(str(row.get(f"name_{side}") or row.get("name")))
                    stack = known[place].get(call)
                    if stack is None and place not in told:
                        told[place] = _read(source.construct, process)
                    each[side] = _frames(stack) if stack else _calls(told[place], call)
                said += _of_sides(each)
            if said:
                found[str(row["name"])] = said
    return found


def _read(read: Callable[[Process], dict[str, _Said]], process: Process) -> dict[str, _Said]:
    try:
        return read(process)
    except DumpError as error:
        _log.warning("%s; nothing of it is shown", error)
        return {}


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


def _calls(told: Mapping[str, str | None], call: str) -> list[str]:
    """Without a stack, the calls of modules around it, where the dump tells of them."""
    around = construct.around(told, call)[:FRAMES]
    if not around:
        return [" no stack was recorded"]
    return [" no stack was recorded; it ran in", *(f"  {outer}" for outer in around)]


def _frames(stack: str) -> list[str]:
    # a frame is two lines: where, and the code there
    frames = [frame for frame in _FRAME.split(stack) if not _MACHINERY.search(frame)]
    shown = [" ".join(frame.split()) for frame in frames[:FRAMES]]
    more = [f"  … {len(frames) - FRAMES} more frames"] if len(frames) > FRAMES else []
    return ["", *(f"  {frame}" for frame in shown), *more]


def column(records: pl.DataFrame, stage: StagePlan) -> pl.Series:
    """The target's stack at the first record of each call, null elsewhere, as msprobe has it.

    Args:
        records: the stage's comparison, all processes.
        stage: what was compared with what.
    """
    stacks: dict[tuple[int, int], dict[str, str]] = {}
    source: StageSource | None = stage.target
    for pairing in stage.pairings:
        if source is not None and pairing.target is not None:
            stacks[pairing.step, pairing.rank] = _read(source.stacks, pairing.target)
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
