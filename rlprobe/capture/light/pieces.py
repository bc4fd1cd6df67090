"""Which features of the logical tensor a process's part of a module's input or output has.

The logical tensor is that of the Hugging Face model: undivided, and one for each projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from rlprobe.capture.light.coordinates import SequenceShards


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

    @property
    def shards(self) -> SequenceShards:
        """How ranks share the tokens of a sequence."""

    def angles(self, path: str, module: nn.Module) -> torch.dtype | None:
        """The format of cosines where a module gives the angles of all positions.

        The Hugging Face model's gives the cosines and sines of each token; None: as any other.
        """

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

    shards = SequenceShards()

    def pieces(
        self, path: str, module: nn.Module, direction: str, slot: str, width: int
    ) -> Sequence[Piece]:
        # a table of angles is given hidden states only for their format
        if slot == "input" and is_rotary(path):
            return ()
        return (Piece(path, 0, width),)

    def angles(self, path: str, module: nn.Module) -> torch.dtype | None:
        return None


def is_rotary(path: str) -> bool:
    """Whether a module makes the table of rotary embeddings, a row for each position."""
    return path.rpartition(".")[2] == "rotary_emb"
