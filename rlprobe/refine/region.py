"""Where no operator and no law is the cause: between which two places the difference is made.

The target replays the step once more, and every block of the model (its layers, and what stands
before and behind them) begins from the benchmark's numbers. What a block makes of them differs by
what its own code does: one that is beyond its floor is the place; where none is, the difference
adds up, and the region is the shortest run of blocks that makes most of it. One replay answers for
all blocks what a bisection would take one for each halving.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from rlprobe.refine import answers, substitution
from rlprobe.said import COMMA, NOTHING_SAID, Message, Said, joined, restored, say
from rlprobe.spec import Suspects
from rlprobe.store.read import Run

NAME = "region.json"
FORMAT = 1
#: Share of the difference's squares that a region must make.
_MOST = 0.9


class Block(msgspec.Struct, frozen=True):
    """What one block makes of the benchmark's numbers."""

    module: str
    #: Relative L2 difference of its output, of any of its calls, and its floor in the whole run.
    error: float
    floor: float | None


class Region(msgspec.Struct, frozen=True):
    """Between which blocks the difference is made."""

    stage: str
    blocks: list[Block]
    #: First and last block of the region; None where nothing could be put in place.
    first: str | None
    last: str | None
    #: Blocks that differ beyond their floors by themselves.
    beyond: list[str]
    said: str
    failed: list[str]
    #: How its sentence was made (:mod:`rlprobe.said`).
    messages: dict[str, Message] = {}
    format: int = FORMAT

    @property
    def sentence(self) -> Said:
        """What was found, in either language."""
        return restored(self.said, self.messages)


def look(target: Run, suspects: Suspects, rows: pl.DataFrame) -> Region:
    """What a run shows in which every block began from the benchmark's numbers.

    Args:
        target: the run.
        suspects: what was looked at; its ``blocks`` in the order they run.
        rows: of the diagnosed stage, with ``module``, ``direction``, ``slot`` and ``floor``.

    Raises:
        DumpError: what it reports is damaged.
    """
    found, failed = [], []
    for module in suspects.blocks:
        entries = substitution.reported(target, suspects, f"blocks/{module}")
        failed += [f"{module}: {why}" for entry in entries for why in entry.failed]
        if any(entry.calls for entry in entries):
            error = max(float(entry.apart) for entry in entries)
            found.append(Block(module, error, _floor(rows, module)))
    if failed or not found:
        said = say(
            "the benchmark's outputs of blocks could not be put in the target's place: {why}",
            why=failed[0] if failed else say("no block was called"),
        )
        return Region(suspects.stage, found, None, None, [], said, failed[:8])
    beyond = [b.module for b in found if b.floor is not None and not b.error <= b.floor]
    first, last = _ends(found, beyond)
    said = _said(found, beyond, first, last)
    return Region(suspects.stage, found, first.module, last.module, beyond, said, [])


def _floor(rows: pl.DataFrame, module: str) -> float | None:
    """The widest floor of a block's outputs; None where none was judged."""
    made = rows.filter(
        (pl.col("module") == module)
        & (pl.col("direction") == "forward")
        & (pl.col("slot") == "output")
        & pl.col("judged")
    )
    widest = made.get_column("floor").max()
    return float(widest) if isinstance(widest, (int, float)) else None


def _ends(found: list[Block], beyond: list[str]) -> tuple[Block, Block]:
    """First and last block of the region."""
    if beyond:
        inside = [block for block in found if block.module in beyond]
        return inside[0], inside[-1]
    squares = [block.error**2 for block in found]
    wanted = _MOST * sum(squares)
    runs = [
        (last - first, first, last)
        for first in range(len(found))
        for last in range(first, len(found))
        if sum(squares[first : last + 1]) >= wanted
    ]
    _, first, last = min(runs)
    return found[first], found[last]


def between(first: str, last: str) -> Said:
    """A region in words."""
    if first == last:
        return say("inside {block}", block=first)
    return say("between the input of {first} and the output of {last}", first=first, last=last)


def _said(found: list[Block], beyond: list[str], first: Block, last: Block) -> Said:
    begins = say(
        "given the benchmark's numbers at its input, each of {count} blocks was run: ",
        count=len(found),
    )
    where = between(first.module, last.module)
    if not any(block.error for block in found):
        return begins + say("none differs; what runs between them makes the difference")
    if not beyond:
        worst = max(found, key=lambda b: b.error / b.floor if b.floor else 0.0)
        share = NOTHING_SAID
        if worst.floor:
            share = say(" (at most {share:.2g} of it)", share=worst.error / worst.floor)
        return begins + say(
            "none differs by more than its floor{share}, so that no single place is wrong; "
            "{most:.0%} of what they make adds up {where}",
            share=share,
            most=_MOST,
            where=where,
        )
    shown = [
        say(
            "{module} by {error:.2g} ({times:.2g} times its floor)",
            module=b.module,
            error=b.error,
            times=b.error / b.floor,
        )
        for b in found
        if b.module in beyond and b.floor
    ]
    alone = (
        say("it alone differs")
        if len(beyond) == 1
        else say("{count} differ by themselves", count=len(beyond))
    )
    return begins + say(
        "{alone}, {shown}: the difference is made {where}",
        alone=alone,
        shown=joined(shown, COMMA),
        where=where,
    )


def write(directory: Path, found: Region) -> Path:
    """Write ``RESULTS_DIR/refine/region.json``."""
    return answers.write(directory / "refine" / NAME, found)


def read(directory: Path) -> Region | None:
    """What was written; None where nothing was.

    Raises:
        DumpError: it is damaged, or was changed.
    """
    return answers.read(directory / "refine" / NAME, Region, FORMAT)
