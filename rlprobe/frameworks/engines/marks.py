"""Marks in request ids: the one thing that travels from a framework to an engine's model runner.

Engines run in processes of their own which know neither the step nor the sample. A request's id
reaches the runner in every engine (vLLM appends to it, SGLang keeps it), so it carries both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Phase of a request that asks for nothing but a digest of the weights that it is answered with.
WEIGHTS = "weights"

_MARK = re.compile(
    r"rlprobe(?:-(?P<phase>prefill|decode|weights))?:(?P<step>\d+):(?P<trainer_step>-?\d+):(?P<replica>\d+):(?P<number>\d+):"
)


@dataclass(frozen=True)
class Mark:
    """What a marked request says of itself."""

    #: Counted from 0.
    step: int
    #: The trainer's own number of the step.
    trainer_step: int
    #: The replica of the engine that answers it.
    replica: int
    #: Number of the request among those of its step and replica.
    number: int
    #: ``prefill`` or ``decode`` of a recorded sample that the engine is led through, or
    #: :data:`WEIGHTS`; empty where it generates. Samples are numbered by themselves.
    phase: str = ""

    def on(self, request_id: str) -> str:
        """``request_id`` with this mark."""
        kind = f"rlprobe-{self.phase}" if self.phase else "rlprobe"
        return f"{kind}:{self.step}:{self.trainer_step}:{self.replica}:{self.number}:{request_id}"

    @property
    def request(self) -> str:
        """Names the request within its run."""
        led = "forced:" if self.phase else ""
        return f"{led}{self.step}:{self.replica}:{self.number}"


def marked(request_id: str) -> bool:
    """Whether a request id may have a mark, at the cost of a look at its first letters."""
    return request_id.startswith("rlprobe")


def find(request_id: str) -> Mark | None:
    """The mark of a request id; None where it has none."""
    found = _MARK.match(request_id)
    if found is None:
        return None
    named = found.groupdict()
    phase = named.pop("phase") or ""
    return Mark(**{name: int(value) for name, value in named.items()}, phase=phase)
