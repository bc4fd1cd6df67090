"""Tensors beside their statistics, for the light engine: of a few modules, within a budget.

Files are msprobe's: ``dump_tensor_data/{record}.pt`` beside dump.json, one plain CPU tensor each,
named by ``data_name`` in its leaf. A tensor is written while its module runs and gets its name
when the stage ends and its record has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprobe.capture.light.statistics import Statistics, has_values

DIRECTORY = "dump_tensor_data"
_SLOTS = {"input_args": "input", "input_kwargs": "input"}


class Tensors(Statistics):
    """Statistics that keep the tensors they are of.

    Args:
        with_sketch: see :class:`Statistics`.
        directory: of the rank's files.
        wanted: whether what runs now is to be kept.
        budget: bytes that may be written; None: no limit. What no longer fits keeps its statistics
            only, and :attr:`left_out` counts it.
    """

    def __init__(
        self, with_sketch: bool, directory: Path, wanted: Callable[[], bool], budget: int | None
    ) -> None:
        super().__init__(with_sketch)
        self._directory = directory / DIRECTORY
        self._wanted = wanted
        self.budget = budget
        self.bytes = self.kept = self.left_out = 0

    def leaf(self, tensor: Tensor, *, lasting: bool | None = False) -> dict[str, Any]:
        leaf = super().leaf(tensor, lasting=lasting)
        local = getattr(tensor, "_local_tensor", tensor)
        local = local.values() if local.is_nested else local
        if self._wanted() and has_values(local):
            self._keep(leaf, local.detach())
        return leaf

    def _keep(self, leaf: dict[str, Any], tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self.budget is not None and self.bytes + size > self.budget:
            self.left_out += 1
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f".{self.kept}.pt"
        # a copy: what is saved must not share a storage with elements of others
        torch.save(tensor.cpu().clone().contiguous(), self._directory / name)
        leaf["data_name"] = name
        self.kept += 1
        self.bytes += size

    def name(self, data: dict[str, Any]) -> None:
        """Give the files of a stage entry the names of their records."""
        for record, leaf in _leaves(data):
            own = f"{record}.pt"
            (self._directory / leaf["data_name"]).replace(self._directory / own)
            leaf["data_name"] = own


def _leaves(data: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for call, entry in data.items():
        for slot, nest in entry.items():
            yield from _below(f"{call}.{_SLOTS.get(slot, slot)}", nest)


def _below(name: str, nest: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(nest, dict):
        if "data_name" in nest:
            yield name, nest
            return
        for key, item in nest.items():
            yield from _below(f"{name}.{key}", item)
    elif isinstance(nest, list):
        for index, item in enumerate(nest):
            yield from _below(f"{name}.{index}", item)
