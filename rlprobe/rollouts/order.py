"""Which recorded step a replay uses at each of its own steps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from rlprobe.errors import ReplayError


@dataclass(frozen=True)
class ReplayOrder:
    """The replay's step number to the recorded step it takes.

    ``seed`` None takes the real step itself, and the range does not limit it; -1 cycles through
    ``start``..``end`` in order, beginning with ``start`` at step 0; any other integer takes a
    pseudo-random sequence over the range, repeats allowed. Element ``i`` of that sequence is
    ``start + sha256("rlprobe replay 1:{seed}:{i}") mod (end - start + 1)``, the digest read as a
    big-endian integer: the same everywhere, and any step is known without those before it. (The
    bias of the modulus is below 2**-190 for every range there is.)

    Raises:
        ReplayError: nothing is recorded, the range is reversed or negative, or a recorded step
            that the range needs is missing.
    """

    #: Recorded steps that exist.
    available: tuple[int, ...]
    seed: int | None = None
    start: int = 0
    #: Last step of the range, inclusive; None: the last that is recorded.
    end: int | None = None

    def __init__(
        self,
        available: Iterable[int],
        seed: int | None = None,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        steps = tuple(sorted(set(available)))
        if not steps:
            raise ReplayError("no recorded step was found; collect rollouts first")
        object.__setattr__(self, "available", steps)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", steps[-1] if end is None else end)
        if seed is not None:
            self._check_range()

    def _check_range(self) -> None:
        last = self._last
        if self.start < 0:
            raise ReplayError(f"steps to replay count from 0; the range starts at {self.start}")
        if last < self.start:
            raise ReplayError(
                f"steps to replay run from {self.start} to {last}, which is empty; recorded: "
                f"{_ranges(self.available)}"
            )
        # Neither bound is trusted to be small, so the gap is found without walking the range.
        have = [step for step in self.available if self.start <= step <= last]
        if len(have) == last - self.start + 1:
            return
        gap = self.start
        for step in have:
            if step != gap:
                break
            gap += 1
        raise ReplayError(
            f"step {gap} of the range {self.start}..{last} was not recorded; recorded: "
            f"{_ranges(self.available)}"
        )

    @property
    def _last(self) -> int:
        assert self.end is not None
        return self.end

    def recorded(self, step: int) -> int:
        """The recorded step that the replay's own ``step`` (from 0) takes.

        Raises:
            ReplayError: ``seed`` is None and that step was not recorded.
        """
        if self.seed is None:
            if step not in self.available:
                raise ReplayError(
                    f"step {step} was not recorded; recorded: {_ranges(self.available)}. Collect "
                    "it, or set a replay seed to choose among those recorded"
                )
            return step
        width = self._last - self.start + 1
        if self.seed == -1:
            return self.start + step % width
        draw = hashlib.sha256(f"rlprobe replay 1:{self.seed}:{step}".encode()).digest()
        return self.start + int.from_bytes(draw, "big") % width


def _ranges(steps: tuple[int, ...]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
