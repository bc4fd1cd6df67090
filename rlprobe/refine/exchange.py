"""What the target's suspect made of what the benchmark's was given.

Inputs alike, what differs is made here; where it makes the benchmark's numbers, it was given
others (:mod:`rlprobe.capture.trace.exchange`). Where it makes them once it is told what the
benchmark's was told, that is why.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.errors import DumpError
from rlprobe.refine.difference import number
from rlprobe.said import NOTHING_SAID, Said, exactly, listed, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

#: One line, of some kilobytes.
_MAX_BYTES = 1 << 20
#: Numbers that are named.
_NAMED = 6


class Told(msgspec.Struct):
    """Numbers that the modules were told otherwise, and what it makes with the benchmark's."""

    names: list[str]
    there: list[Any]
    here: list[Any]
    #: Whole numbers are not: they may be sizes of what a kernel reads and writes.
    tried: bool = True
    outputs: dict[str, float | str] = {}
    failed: str | None = None


class Entry(msgspec.Struct):
    """Relative differences of what was made, by name; a word where one is not finite."""

    outputs: dict[str, float | str] = {}
    gradients: dict[str, float | str] = {}
    failed: str | None = None
    told: list[Told] = []


def read(target: Run, suspects: Suspects) -> Entry | None:
    """What a run reports of it; None where nothing was tried.

    Raises:
        DumpError: it is damaged.
    """
    written = target.written(suspects.stage, suspects.step, suspects.rank)
    path = written / "exchange" / "exchanged.jsonl"
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(read_bytes(path, _MAX_BYTES), type=Entry)
    except (DocumentError, msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not readable: {error}; refine again") from error


def said(entry: Entry, module: str, floor: float, *, later: bool = False) -> Said | None:
    """What was seen, in words; None where that says nothing.

    Args:
        entry: what the target's run reports.
        module: the suspect.
        floor: relative difference of results that agree.
        later: whether what parts is a later call of it on the same sample than the one it was.
    """
    if entry.failed is not None:
        return say(
            "the target's {module} could not be run on what the benchmark's was given: {why}",
            module=module,
            why=entry.failed,
        )
    outputs, gradients = _largest(entry.outputs), _largest(entry.gradients)
    if outputs is None:
        return None
    if any(
        math.isnan(float(size)) for size in (*entry.outputs.values(), *entry.gradients.values())
    ):
        return say(
            "on the inputs that the benchmark's was given, one side's {module} makes numbers that "
            "are not finite, so that nothing says by how much the two differ",
            module=module,
        )
    text = say(
        "on the inputs that the benchmark's was given, the target's {module} makes outputs that "
        "differ from the benchmark's by {size:.2g}",
        module=module,
        size=outputs[1],
    )
    if gradients is not None:
        text += say(
            ", and of the same gradients others by {size:.2g} at most ({name})",
            size=gradients[1],
            name=gradients[0],
        )
    text += _conclusion(max(outputs[1], gradients[1] if gradients else 0.0), floor, later)
    untried = [one for one in entry.told if not one.tried]
    if untried:
        text += say("; it was told {numbers}, which was not tried", numbers=_numbers(untried[0]))
    return text


def setting(entry: Entry, module: str, floor: float) -> Said | None:
    """The numbers that the target was told otherwise and that make the difference; None: none do.

    With its own it parts from the benchmark's outputs, with the benchmark's it makes them. Of
    several that differ the first that does so by itself, else all of them together.

    Args:
        entry, module, floor: as of :func:`said`.
    """
    own = _largest(entry.outputs)
    if own is None or not floor or not own[1] > floor:
        return None
    for one in entry.told:
        made = _largest(one.outputs) if one.tried and one.failed is None else None
        if made is not None and made[1] <= floor:
            return say(
                "{numbers} in {module}: told the benchmark's, the target makes the benchmark's "
                "outputs of its inputs ({size:.2g} apart, and {own:.2g} with its own)",
                numbers=_numbers(one),
                module=module,
                size=made[1],
                own=own[1],
            )
    return None


def _numbers(told: Told) -> Said:
    return listed([*map(_one, told.names, told.there, told.here)], _NAMED)


def _one(name: str, there: Any, here: Any) -> Said:
    return say(
        "{name} {target} on the target instead of {benchmark}",
        name=exactly(name),
        target=number(here),
        benchmark=number(there),
    )


def _conclusion(size: float, floor: float, later: bool) -> Said:
    if not floor:
        return NOTHING_SAID
    if size > floor:
        return say(": the difference is made here, whatever it was given")
    if later:
        return say(": no more than noise, in a call before the one that parts")
    return say(": no more than noise, so that it was given other numbers")


def _largest(found: dict[str, float | str]) -> tuple[str, float] | None:
    sizes = [(name, float(value)) for name, value in found.items()]
    return max(sizes, key=lambda pair: pair[1], default=None)
