"""What each training step is compared with: the engine's passes of that step.

A run's own generate stage has training's steps. An engine that dumps by itself counts forward
passes, not training steps; there the prompts tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rlprobe.compare.match import pairs
from rlprobe.compare.match.rules import Rules
from rlprobe.compare.stage_sources import Process, StageSource
from rlprobe.compare.traininfer.passes import Pass, passes
from rlprobe.compare.traininfer.tokens import match, with_starts
from rlprobe.dumps.key_data import KeyData
from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import DumpError
from rlprobe.said import Said, say


@dataclass(frozen=True)
class Sides:
    """Where both models' records are."""

    inference: StageSource
    training: StageSource
    #: Whether the engine's dump is one of its own, whose steps are its forward passes.
    apart: bool
    #: The run's key data, None without.
    data: KeyData | None
    rules: Rules
    #: Check the CRC-32 of every tensor file that is read.
    check_crc: bool


@dataclass(frozen=True)
class Step:
    """One training step, and what the engine did for it."""

    number: int
    #: Processes that dumped it; the engine's have a step of their own where it dumps by itself.
    engines: Sequence[Process]
    trainers: Sequence[Process]
    inference: Sequence[Pass]
    training: Sequence[Pass]


def steps(sides: Sides, notes: list[Said]) -> Iterator[Step]:
    """Every training step; what cannot be placed is added to ``notes``.

    Raises:
        DumpError: token ids or positions are damaged.
    """
    trainers: dict[int, list[Process]] = {}
    for process in sorted(sides.training.processes):
        trainers.setdefault(process.step, []).append(process)
    if not sides.apart:
        for number, processes in trainers.items():
            engines = [p for p in sides.inference.processes if p.step == number]
            inference = _passes(sides, sides.inference, engines)
            yield Step(number, engines, processes, inference, _training(sides, processes))
        return
    training = {number: _training(sides, processes) for number, processes in trainers.items()}
    every = _passes(sides, sides.inference, sides.inference.processes)
    placed = _placed(every, training, notes)
    for number, processes in trainers.items():
        inference = [p for p, step in zip(every, placed, strict=True) if step == number]
        engines = list(dict.fromkeys(p.process for p in inference))
        if not every and number == min(trainers):
            engines = list(sides.inference.processes)
        if engines:
            yield Step(number, engines, processes, inference, training[number])


def _training(sides: Sides, processes: Sequence[Process]) -> list[Pass]:
    found = _passes(sides, sides.training, processes)
    if sides.data is None:
        return found
    batches = sides.data.micro_batches(processes[0].step)
    return [with_starts(p, batches.get((p.process.rank, p.number))) for p in found]


def _passes(sides: Sides, source: StageSource, processes: Sequence[Process]) -> list[Pass]:
    found = []
    for process in processes:
        tensors = source.tensors(process, sides.check_crc)
        if tensors is None:
            continue
        try:
            records = source.table(process).rows(pairs.LOADED)
            found += passes(process, records, tensors, sides.rules)
        except TensorFileError as error:
            raise DumpError(
                f"token ids or positions of step {process.step}, rank {process.rank}: {error}"
            ) from error
    return found


def _placed(
    every: Sequence[Pass], training: dict[int, list[Pass]], notes: list[Said]
) -> list[int | None]:
    """The training step of each of the engine's passes; None where nothing says."""
    having: list[set[int]] = [set() for _ in every]
    for number, found in training.items():
        for place, parts in enumerate(match(every, found)):
            if parts:
                having[place].add(number)
    # passes of no known prompt (generated tokens, mostly) are counted with the first step
    placed: list[int | None] = [min(training, default=None)] * len(every)
    for rank in {p.process.rank for p in every}:
        mine = [n for n, p in enumerate(every) if p.process.rank == rank and having[n]]
        for n, step in zip(mine, by_order([having[n] for n in mine]), strict=True):
            placed[n] = step
    left = sum(step is None and bool(found) for step, found in zip(placed, having, strict=True))
    if left:
        notes.append(
            say(
                "{left} of {all} forward passes of the engine hold prompts of several steps and "
                "may be of either; they are not compared",
                left=left,
                all=len(every),
            )
        )
    return placed


def by_order(having: Sequence[Collection[int]]) -> list[int | None]:
    """The step of each pass of one rank.

    A pass whose prompts are of several steps is of the one that the passes before and after it are
    of. Where no prompt is of one step alone, all passes are taken to be of the first.

    Args:
        having: the steps that have the prompts of each pass, at least one, in the order the engine
            ran them.
    """
    sure = [next(iter(steps_)) if len(steps_) == 1 else None for steps_ in having]
    known = [n for n, step in enumerate(sure) if step is not None]
    if not known:
        return [min(steps_) for steps_ in having]
    found: list[int | None] = []
    for n, steps_ in enumerate(having):
        around = {
            sure[place]
            for place in (
                max((k for k in known if k <= n), default=None),
                min((k for k in known if k >= n), default=None),
            )
            if place is not None
        }
        step = around.pop() if len(around) == 1 else None
        found.append(step if step in steps_ else None)
    return found
