"""Which features of the logical tensor a process's part of a module's input or output has.

The logical tensor is that of the Hugging Face model: undivided, and one for each projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import nn


@dataclass(frozen=True)
class Piece:
    """A part of a tensor with a record of its own."""

    #: Hugging Face path of the module whose input or output it is.
    module: str
    #: First feature in the logical tensor, and how many that has.
    first: int
    width: int
    #: Features of the process's tensor; None: all of them.
    features: tuple[int, ...] | None = None


class Places(Protocol):
    """Where the parts of a model's tensors lie."""

    def pieces(
        self, path: str, module: nn.Module, direction: str, slot: str, width: int
    ) -> Sequence[Piece]:
        """The pieces of a tensor; none where it is no part of a logical one, or not known.

        Args:
            path: Hugging Face path of the module.
            module: the module.
            direction: forward or backward (then of the gradients).
            slot: input or output of the module, in either direction.
            width: features of the process's tensor.
        """


class Undivided:
    """Modules that have their tensors whole, under their own names: FSDP, DDP, one process."""

    def pieces(
        self, path: str, module: nn.Module, direction: str, slot: str, width: int
    ) -> Sequence[Piece]:
        return () if in_experts(path) else (Piece(path, 0, width),)


def in_experts(path: str) -> bool:
    """Whether a module works on tokens that were chosen for it, in an order of their own."""
    parts = path.split(".")
    return "experts" in parts[:-1] or parts[-1] == "experts"
