"""Sketches inside msprobe: one more key in every leaf it writes.

All of msprobe's tasks pass each tensor, parameter and gradient through
``PytorchDataProcessor._analyze_tensor`` (mindstudio-probe 26). The sketch is made there and filled
in by the callback that runs before a dump is written, in one transfer; msprobe's own tools ignore
the key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlprobe import sketch as sketch_definition
from rlprobe.capture.light.sketches import sketch
from rlprobe.capture.light.statistics import has_values


class _Waiting:
    """Sketches made and not yet written into their leaves."""

    def __init__(self) -> None:
        self._pairs: list[tuple[dict[str, Any], Tensor]] = []

    def add(self, leaf: dict[str, Any], tensor: Tensor) -> None:
        if tensor.dim() and not tensor.is_complex() and has_values(tensor):
            self._pairs.append((leaf, sketch(tensor)))

    def fill(self) -> None:
        if not self._pairs:
            return
        rows = torch.stack([row for _, row in self._pairs]).cpu()
        finite = torch.isfinite(rows).all(dim=1).tolist()
        for (leaf, _), row, good in zip(self._pairs, rows.numpy(), finite, strict=True):
            if good:
                leaf["Sketch"] = sketch_definition.encode(row)
        self._pairs.clear()


@contextlib.contextmanager
def sketched(wanted: bool) -> Iterator[None]:
    """Add sketches to every leaf that msprobe makes in the body."""
    if not wanted:
        yield
        return
    from msprobe.core.dump.data_dump.data_processor.pytorch_processor import PytorchDataProcessor

    original = PytorchDataProcessor._analyze_tensor
    waiting = _Waiting()

    def analyze(self: Any, tensor: Tensor, suffix: str) -> Any:
        leaf = original(self, tensor, suffix)
        waiting.add(leaf, self.tensor_handler.convert_common_tensor(tensor).detach())
        self.data_writer.register_pre_flush_callback(waiting.fill)
        return leaf

    PytorchDataProcessor._analyze_tensor = analyze
    try:
        yield
    finally:
        PytorchDataProcessor._analyze_tensor = original
