"""What the target's suspect made of what the benchmark's was given.

Inputs alike, what differs is made here; where it makes the benchmark's numbers, it was given
others (:mod:`rlprobe.capture.trace.exchange`).
"""

from __future__ import annotations

import msgspec

from rlprobe.documents.limits import DocumentError, read_bytes
from rlprobe.errors import DumpError
from rlprobe.said import NOTHING_SAID, Said, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

#: One line, of some kilobytes.
_MAX_BYTES = 1 << 20


class Entry(msgspec.Struct):
    """Relative differences of what was made, by name; a word where one is not finite."""

    outputs: dict[str, float | str] = {}
    gradients: dict[str, float | str] = {}
    failed: str | None = None


def said(target: Run, suspects: Suspects, floor: float) -> Said | None:
    """What was seen, in words; None where nothing was tried.

    Args:
        target: the run in which it was.
        suspects: what was looked at.
        floor: relative difference of results that agree.

    Raises:
        DumpError: what it reports is damaged.
    """
    written = target.written(suspects.stage, suspects.step, suspects.rank)
    path = written / "exchange" / "exchanged.jsonl"
    if not path.is_file():
        return None
    try:
        entry = msgspec.json.decode(read_bytes(path, _MAX_BYTES), type=Entry)
    except (DocumentError, msgspec.MsgspecError, RecursionError) as error:
        raise DumpError(f"{path} is not readable: {error}; refine again") from error
    return _of(entry, suspects.trace_module or "", floor)


def _of(entry: Entry, module: str, floor: float) -> Said | None:
    if entry.failed is not None:
        return say(
            "the target's {module} could not be run on what the benchmark's was given: {why}",
            module=module,
            why=entry.failed,
        )
    outputs, gradients = _largest(entry.outputs), _largest(entry.gradients)
    if outputs is None:
        return None
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
    return text + _conclusion(max(outputs[1], gradients[1] if gradients else 0.0), floor)


def _conclusion(size: float, floor: float) -> Said:
    if not floor:
        return NOTHING_SAID
    if size > floor:
        return say(": the difference is made here, whatever it was given")
    return say(": no more than noise, so that it was given other numbers")


def _largest(found: dict[str, float | str]) -> tuple[str, float] | None:
    sizes = [(name, float(value)) for name, value in found.items()]
    return max(sizes, key=lambda pair: pair[1], default=None)
