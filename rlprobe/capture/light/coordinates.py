"""Where the tokens of a micro-batch lie in a model's tensors, and sketches by what they are.

The definition is :mod:`rlprobe.coordinates`. A :class:`Batch` says which rows of a tensor are
tokens, and what their keys are; which tokens a micro-batch holds is told by the framework's hooks,
or read off what the model is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlprobe import coordinates
from rlprobe.capture.light.sketches import has_fp64
from rlprobe.sketch import K, signs

#: The ids of each sample's tokens, in the order of the batch.
Samples = Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Grid:
    """Rows and columns of the token ids that a model is given, and which of them are tokens."""

    rows: int
    columns: int
    #: Of the flattened grid, in the order of the samples' tokens; None: every place is a token.
    places: npt.NDArray[np.int64] | None
    #: Tensors are [columns, rows, …] (Megatron).
    columns_first: bool = False


class Batch:
    """A micro-batch's tokens on a device.

    Args:
        samples: the ids of each sample's tokens.
        grid: how they lie in the model's tensors.
        device: where these are.
    """

    def __init__(self, samples: Samples, grid: Grid, device: torch.device) -> None:
        keys = np.concatenate([coordinates.token_keys(sample) for sample in samples])
        self.tokens = len(keys)
        #: Sum of the keys: what ranks that hold the same tokens have in common.
        self.identity = int(np.add.reduce(keys, dtype=np.uint64))
        self._grid = grid
        self._shifts = torch.from_numpy(coordinates.shifts(keys)).to(device)
        self._signs = torch.from_numpy(coordinates.token_signs(keys)).to(device)
        self._places = None if grid.places is None else torch.from_numpy(grid.places).to(device)

    def rows(self, tensor: Tensor) -> Tensor | None:
        """A tensor's tokens, shape (tokens, features); None where no axes of it count them.

        Accepted are [rows, columns, …], Megatron's [columns, rows, …], and [rows * columns, …] of a
        tensor that is flattened.
        """
        grid, shape = self._grid, tensor.shape
        order = (grid.rows, grid.columns)
        leading = tuple(shape[:2])
        # with one row, or one column, both orders lie the same
        alike = 1 in order and leading in (order, order[::-1])
        if tensor.dim() >= 2 and (alike or leading == order[:: -1 if grid.columns_first else 1]):
            if grid.columns_first and not alike:
                tensor = tensor.transpose(0, 1)
        elif not tensor.dim() or shape[0] != grid.rows * grid.columns or grid.columns_first:
            return None
        flat = tensor.reshape(grid.rows * grid.columns, -1)
        return flat if self._places is None else flat.index_select(0, self._places)

    def sketch(self, rows: Tensor, first: int, width: int) -> Tensor:
        """Sketch of tokens' features, shape (groups of the width, K), on their device.

        Args:
            rows: shape (tokens, features of this shard).
            first: the shard's first feature in the whole.
            width: features of the whole.
        """
        wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
        values = rows if rows.dtype == wide else rows.to(wide)
        own = self._signs if wide == torch.float32 else self._signs.to(wide)
        count = values.shape[1]
        # by shift first: from here on there are K rows, however many tokens there were
        moved = torch.zeros(K, count, dtype=wide, device=values.device)
        moved.index_add_(0, self._shifts, values * own.unsqueeze(1))
        index, features = _buckets(first, count, width, values.device)
        moved *= features if wide == torch.float32 else features.to(wide)
        exact = torch.float64 if has_fp64(values.device) else wide
        number = coordinates.groups(width)
        found = torch.zeros(number * K, dtype=exact, device=values.device)
        found.index_add_(0, index, moved.view(-1).to(exact))
        return found.view(number, K)


_tables: dict[tuple[int, int, int, torch.device], tuple[Tensor, Tensor]] = {}


def _buckets(first: int, count: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The bucket of every (shift, feature), flattened, and the features' signs."""
    key = (first, count, width, device)
    found = _tables.get(key)
    if found is None:
        feature = np.arange(first, first + count)
        bucket = (np.arange(K)[:, None] + feature) % K
        group = feature * coordinates.groups(width) // width
        # kept for calls in and out of inference mode, as the signs are
        with torch.inference_mode(False):
            found = _tables[key] = (
                torch.from_numpy((group * K + bucket).reshape(-1)).to(device),
                torch.from_numpy(signs(first, count).astype(np.float32)).to(device),
            )
    return found


def grid_of(given: dict[str, Any], samples: Samples | None) -> tuple[Samples, Grid] | None:
    """The samples of a forward pass and how they lie in it; None where that is not known.

    Args:
        given: what the model is called with, by name: ``input_ids`` and, where it has them,
            ``attention_mask``, ``position_ids`` and ``packed_seq_params`` (Megatron).
        samples: the ids of the samples' tokens where the framework says them; else they are read
            off ``input_ids``.
    """
    packed = given.get("packed_seq_params")
    if packed is not None:
        return None if samples is None else _packed_grid(packed, samples)
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_nested or not ids.numel():
        return None
    rows, columns = (int(size) for size in ids.shape)
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != (rows, columns):
        mask = None
    if samples is None:
        samples = _read(ids, mask, given.get("position_ids"))
    total = sum(map(len, samples))
    if mask is not None and len(samples) == rows:
        places = np.flatnonzero(mask.detach().cpu().numpy().astype(bool).reshape(-1))
        return None if len(places) != total else (samples, _whole(rows, columns, places))
    if rows * columns == total:
        return samples, Grid(rows, columns, None)
    if rows == 1 and columns > total:  # one row, filled up to a multiple of something
        return samples, Grid(rows, columns, np.arange(total))
    return None


def _whole(rows: int, columns: int, places: npt.NDArray[np.int64]) -> Grid:
    return Grid(rows, columns, None if len(places) == rows * columns else places)


def _packed_grid(packed: Any, samples: Samples) -> tuple[Samples, Grid] | None:
    """Megatron's packed row: each sample begins where ``cu_seqlens`` says, its padding behind."""
    bounds = getattr(packed, "cu_seqlens_q_padded", None)
    bounds = getattr(packed, "cu_seqlens_q", None) if bounds is None else bounds
    if bounds is None:
        return None
    starts = [int(bound) for bound in bounds.tolist()]
    fits = len(starts) == len(samples) + 1 and all(
        len(sample) <= after - before
        for sample, before, after in zip(samples, starts, starts[1:], strict=False)
    )
    if not fits:
        return None
    places = np.concatenate(
        [start + np.arange(len(s)) for start, s in zip(starts, samples, strict=False)]
    )
    columns = starts[-1]
    return samples, Grid(1, columns, None if len(places) == columns else places, columns_first=True)


def _read(ids: Tensor, mask: Tensor | None, positions: Any) -> Samples:
    """The samples that a model's input holds: rows, or the parts of a row that begin at 0."""
    table = ids.detach().cpu().numpy().astype(np.int64)
    if mask is not None:
        used = mask.detach().cpu().numpy().astype(bool)
        return [row[own] for row, own in zip(table, used, strict=True)]
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        found = []
        for row, place in zip(table, positions.detach().cpu().numpy(), strict=True):
            starts = [int(at) for at in np.flatnonzero(place == 0)] or [0]
            found += [part for part in np.split(row, starts) if len(part)]
        return found
    return list(table)
