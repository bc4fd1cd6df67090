"""What a capture engine is: the interface of the light and the msprobe engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import nn


@dataclass(frozen=True)
class StageContext:
    """Which stage of which step and rank is captured, and where its files go."""

    #: Canonical stage name.
    stage: str
    #: Captured step, counted from 0.
    step: int
    rank: int
    #: ``{dump}/{stage}/step{step}/rank{rank}``.
    directory: Path
    #: Of generation: the caller picks the forwards, so no tokens are counted here.
    chosen_forwards: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.stage, self.step


@dataclass(frozen=True)
class Tally:
    """What one entry of a stage added to its files."""

    #: Tensors and scalars recorded.
    records: int = 0
    #: Module or API calls recorded, forward and backward.
    calls: int = 0


class Watch(Protocol):
    """A stage being captured, from :meth:`Engine.watch` until finish or abort."""

    def micro_step(self, index: int) -> None:
        """A micro-batch begins. In generation a new sequence begins: tokens count from 0."""

    def tokens(self, samples: Sequence[npt.NDArray[np.int64]] | None) -> None:
        """The tokens of each sample of the micro-batch that begins; None where unknown."""

    def updated(self) -> None:
        """An optimizer is about to step: what runs after it has other weights."""

    def finish(self) -> Tally:
        """Remove every hook and publish the stage's files (written aside, then renamed)."""

    def abort(self) -> None:
        """Remove every hook and leave nothing that could be taken for a complete capture."""


class Engine(Protocol):
    """Captures model layers. One object serves all stages of a role in a process."""

    #: ``light`` or ``msprobe``.
    name: str

    def watch(self, context: StageContext, models: list[nn.Module]) -> Watch:
        """Begin to capture; a stage entered again in the same step goes on where it stopped."""


#: A leaf or a nest of leaves, as JSON will hold it.
Nest = dict[str, Any] | list[Any] | None
