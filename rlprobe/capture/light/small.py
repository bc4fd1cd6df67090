"""Small CPU tensors, of which a copy is kept and all that is recorded is computed together.

Four operations and a sketch on 256 numbers cost their calls, not their numbers. So a small tensor
is copied as it is now, and copies of one shape become the rows of one tensor, reduced row by row:
each row is added up as the tensor alone would be, which ``tests/unit/test_capture_small.py`` holds
to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlprobe.capture.light import onepass
from rlprobe.capture.light.onepass import LEAST, Reading, readings
from rlprobe.capture.light.sketches import sketch_rows

#: Bytes of one shape's copies that are kept before they are reduced.
_KEPT = 1 << 20


def takes(tensor: Tensor) -> bool:
    """Whether :meth:`Small.add` takes a tensor."""
    return tensor.numel() < LEAST and onepass.is_plain(tensor)


class Small:
    """Small tensors whose numbers are made together.

    Args:
        sketched: whether sketches are wanted.
    """

    def __init__(self, sketched: bool) -> None:
        self._sketched = sketched
        #: Of each shape: copies, and the place of each among all.
        self._waiting: dict[torch.Size, tuple[list[Tensor], list[int]]] = {}
        self._readings: list[Reading | None] = []

    def add(self, tensor: Tensor) -> None:
        """Take a tensor's numbers as they are now."""
        group = self._waiting.get(tensor.shape)
        if group is None:
            group = self._waiting[tensor.shape] = [], []
        copies, places = group
        copies.append(tensor.detach().clone())
        places.append(len(self._readings))
        self._readings.append(None)
        if len(copies) * tensor.numel() * 4 >= _KEPT:
            self._reduce(copies, places)

    def _reduce(self, copies: list[Tensor], places: list[int]) -> None:
        rows = torch.stack(copies).view(len(copies), -1)
        of_rows = (
            torch.amax(rows, 1),
            torch.amin(rows, 1),
            torch.mean(rows, 1),
            torch.linalg.vector_norm(rows, dim=1),
        )
        numbers = torch.stack(of_rows, 1).tolist()
        sketches = sketch_rows(rows).numpy() if self._sketched else [None] * len(numbers)
        for place, found in zip(places, readings(numbers, sketches), strict=True):
            self._readings[place] = found
        copies.clear()
        places.clear()

    def found(self) -> list[Reading]:
        """The readings, in the order in which the tensors were added."""
        for copies, places in self._waiting.values():
            if copies:
                self._reduce(copies, places)
        return [reading for reading in self._readings if reading is not None]
