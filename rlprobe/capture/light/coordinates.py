"""Where the tokens of a micro-batch lie in a model's tensors, and sketches by what they are.

The definition is :mod:`rlprobe.coordinates`. A :class:`Batch` says which rows of a tensor are
tokens, and what their keys are; which tokens a micro-batch holds is told by the framework's hooks,
or read off what the model is given.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlprobe import coordinates
from rlprobe.capture.light import onepass
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
    #: Of all the samples' tokens in order, those that lie in this grid, as many as there are
    #: places; None: all of them. Context-parallel ranks have some each.
    held: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class SequenceShards:
    """How ranks of one model share the tokens of a sequence."""

    #: Context parallelism: every tensor has the rank's own tokens alone.
    context: int = 1
    context_rank: int = 0
    #: Sequence parallelism: between the projections, tensors have one of so many equal stretches.
    stretches: int = 1
    stretch: int = 0


class Batch:
    """A micro-batch's tokens on a device.

    Args:
        samples: the ids of each sample's tokens.
        grid: how they lie in the model's tensors.
        device: where these are.
    """

    def __init__(self, samples: Samples, grid: Grid, device: torch.device) -> None:
        keys = np.concatenate([coordinates.token_keys(own) for own in samples])
        positions = np.concatenate([np.arange(len(own)) for own in samples])
        if grid.held is not None:
            keys, positions = keys[grid.held], positions[grid.held]
        self._place(keys, grid, device)
        #: Of each token among its sample's own; None where rows are in an order of their own.
        self.positions: npt.NDArray[np.int64] | None = positions

    @classmethod
    def of_rows(cls, keys: Tensor) -> Batch | None:
        """Rows in any order, the same token's in several of them or not; None without tokens.

        Args:
            keys: of each row's token, shape (rows,), int64 with the bits of
                :func:`rlprobe.coordinates.token_keys`; 0: the row is no token's.
        """
        found = keys.detach().cpu().numpy().astype(np.int64).view(np.uint64)
        places = np.flatnonzero(found)
        if not len(places):
            return None
        batch = cls.__new__(cls)
        batch._place(found[places], _whole(1, len(found), places), keys.device)
        batch.positions = None
        return batch

    def stretch(self, number: int, count: int) -> Batch | None:
        """One of equal stretches of Megatron's [columns, rows, …]; None where it has no tokens.

        Args:
            number: which of them, from 0.
            count: how many there are.
        """
        keys = self.row_keys()
        each, rest = divmod(len(keys), count)
        return None if rest else Batch.of_rows(keys[number * each : (number + 1) * each])

    def _place(self, keys: coordinates.Keys, grid: Grid, device: torch.device) -> None:
        self.tokens = len(keys)
        #: Of the tokens, in the order of :meth:`rows`.
        self.keys = keys
        #: Sum of the keys: what ranks that hold the same tokens have in common.
        self.identity = int(np.add.reduce(keys, dtype=np.uint64))
        self._grid = grid
        self._device = device
        self._shifts = torch.from_numpy(coordinates.shifts(keys)).to(device)
        self._signs = torch.from_numpy(coordinates.token_signs(keys)).to(device)
        self._places = None if grid.places is None else torch.from_numpy(grid.places).to(device)

    def row_keys(self) -> Tensor:
        """The key of every row of a flattened tensor, as :meth:`of_rows` takes them.

        In the order of the model's own tensors: Megatron's are [columns, rows, …].
        """
        grid = self._grid
        flat = np.zeros(grid.rows * grid.columns, np.uint64)
        flat[slice(None) if grid.places is None else grid.places] = self.keys
        if grid.columns_first:
            flat = flat.reshape(grid.rows, grid.columns).T.reshape(-1)
        return torch.from_numpy(np.ascontiguousarray(flat).view(np.int64)).to(self._device)

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
        elif (
            not tensor.dim()
            or shape[0] != grid.rows * grid.columns
            # flattened from [columns, rows], which is another order where both count
            or (grid.columns_first and grid.rows > 1)
        ):
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
        kernel = onepass.by_coordinates(values)
        if kernel is not None:
            out = np.zeros((coordinates.groups(width), K))
            _, features = _buckets(first, count, width, values.device)
            kernel(
                onepass.elements(values).reshape(values.shape),
                self._shifts.numpy(),
                self._signs.numpy(),
                features.numpy(),
                first,
                width,
                out,
            )
            return torch.from_numpy(out)
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


class Tokens:
    """Which tokens the model's forward pass works on, and which its experts."""

    def __init__(self) -> None:
        #: Of the forward pass that runs now; None where nothing tells its tokens.
        self.batch: Batch | None = None
        #: Calls of the model whose tokens nothing told.
        self.skipped = 0
        self.shards = SequenceShards()
        self._stretch: tuple[Batch, Batch | None] | None = None
        self._samples: Samples | None = None
        self._closed = False
        #: The rows that experts were given, by the path of their container and their number.
        self._experts: dict[str, dict[int, Batch]] = {}

    def told(self, samples: Samples | None) -> None:
        """The samples of the micro-batch that begins, where the framework says them."""
        self._samples = samples

    def enter(self, given: dict[str, Any], device: torch.device) -> None:
        """The model is called.

        Args:
            given: its arguments by name.
            device: where its tensors are.
        """
        self._experts.clear()
        found = grid_of(given, self._samples, self.shards)
        self.batch = None if found is None else Batch(found[0], found[1], device)
        self.skipped += found is None

    def close(self) -> None:
        """Weights change: nothing is said of rows any more; routers still choose for tokens."""
        self._closed = True
        self._experts.clear()

    def dispatched(self, experts: str, rows: dict[int, Batch]) -> None:
        """Rows were sent to experts.

        Args:
            experts: path of their container.
            rows: by an expert's number among all.
        """
        self._experts[experts] = rows

    def of(self, path: str) -> Batch | None:
        """The tokens of a module's rows; None where that is not known, or not wanted any more."""
        if self._closed:
            return None
        found = _EXPERT.match(path)
        if found is None:
            return self.batch
        return self._experts.get(found["container"], {}).get(int(found["number"]))

    def stretch(self, batch: Batch) -> Batch | None:
        """This rank's stretch of a batch, where sequences are divided so; None where not."""
        shards = self.shards
        if shards.stretches == 1 or batch is not self.batch:
            return None
        if self._stretch is None or self._stretch[0] is not batch:
            self._stretch = batch, batch.stretch(shards.stretch, shards.stretches)
        return self._stretch[1]


#: A module of one expert of several, or in one.
_EXPERT = re.compile(r"^(?P<container>.*\bexperts)\.(?P<number>\d+)(\.|$)")


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


def grid_of(
    given: dict[str, Any], samples: Samples | None, shards: SequenceShards | None = None
) -> tuple[Samples, Grid] | None:
    """The samples of a forward pass and how they lie in it; None where that is not known.

    Args:
        given: what the model is called with, by name: ``input_ids`` and, where it has them,
            ``attention_mask``, ``position_ids`` and ``packed_seq_params`` (Megatron).
        samples: the ids of the samples' tokens where the framework says them; else they are read
            off ``input_ids``.
        shards: how ranks share a sequence; None: they do not.
    """
    shards = shards or SequenceShards()
    packed = given.get("packed_seq_params")
    if packed is not None:
        read = samples is None and shards.context == 1
        if read:
            samples = _read_packed(packed, given.get("input_ids"))
        return None if samples is None else _packed_grid(packed, samples, shards, filled=read)
    if shards.context > 1:
        return None  # which tokens a rank has is known of packed rows alone
    if given.get("past_key_values") is not None:
        return None  # what came before, which a token's key is made of, is not here
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


def _packed_grid(
    packed: Any, samples: Samples, shards: SequenceShards, filled: bool
) -> tuple[Samples, Grid] | None:
    """Megatron's packed row: each sample begins where ``cu_seqlens`` says, its padding behind.

    Args:
        packed: Megatron's parameters of the row.
        samples: the ids of the samples' tokens.
        shards: how ranks share a sequence.
        filled: whether a last stretch may be nobody's.
    """
    bounds = getattr(packed, "cu_seqlens_q_padded", None)
    bounds = getattr(packed, "cu_seqlens_q", None) if bounds is None else bounds
    if bounds is None:
        return None
    starts = [int(bound) for bound in bounds.tolist()]
    most = len(samples) + 1 + filled
    fits = len(samples) + 1 <= len(starts) <= most and all(
        len(sample) <= after - before
        for sample, before, after in zip(samples, starts, starts[1:], strict=False)
    )
    if not fits:
        return None
    columns = starts[-1]
    #: Of every column of the whole row, the number of its token among all samples', or -1.
    tokens = np.full(columns, -1)
    first = 0
    for sample, start in zip(samples, starts, strict=False):
        tokens[start : start + len(sample)] = first + np.arange(len(sample))
        first += len(sample)
    own = _of_context_rank(tokens, starts, getattr(packed, "cp_partition_mode", None), shards)
    if own is None:
        return None
    places = np.flatnonzero(own >= 0)
    held = own[places]
    if not len(held):
        return None
    return samples, Grid(
        1,
        len(own),
        None if len(places) == len(own) else places,
        columns_first=True,
        held=None if len(held) == first else held,
    )


def _read_packed(packed: Any, ids: Any) -> Samples | None:
    """The samples of Megatron's packed row, read off its token ids; None where these do not say.

    slime fills a row up with a last stretch of token 0. Where samples have padding of their own,
    the row does not say which tokens are theirs.
    """
    bounds, padded = (getattr(packed, f"cu_seqlens_q{kind}", None) for kind in ("", "_padded"))
    if bounds is None or not isinstance(ids, Tensor):
        return None
    starts = [int(bound) for bound in bounds.tolist()]
    if ids.numel() != starts[-1] or (padded is not None and padded.tolist() != starts):
        return None
    row = ids.detach().cpu().numpy().astype(np.int64).reshape(-1)
    found = [row[start:end] for start, end in itertools.pairwise(starts)]
    if len(found) > 1 and not found[-1].any():
        found.pop()
    return found


def _of_context_rank(
    tokens: npt.NDArray[np.int64], starts: Sequence[int], mode: str | None, shards: SequenceShards
) -> npt.NDArray[np.int64] | None:
    """The columns of a packed row that a context-parallel rank has; None where they do not divide.

    Of each sample, cut into twice as many pieces as there are ranks, a rank has the piece of its
    number from the front and that from the back (Megatron's and Transformer Engine's "zigzag", so
    that causal attention costs each the same), or (``contiguous``) a stretch of the whole row.
    """
    ranks, rank = shards.context, shards.context_rank
    if ranks == 1:
        return tokens
    if mode == "contiguous":
        each, rest = divmod(len(tokens), ranks)
        return None if rest else tokens[rank * each : (rank + 1) * each]
    parts = []
    for start, end in itertools.pairwise(starts):
        sample = tokens[start:end]
        if (sample < 0).all():
            parts.append(sample[: (end - start) // ranks])
            continue
        piece, rest = divmod(end - start, 2 * ranks)
        if rest:
            return None
        parts.append(sample[rank * piece : (rank + 1) * piece])
        parts.append(sample[end - start - (rank + 1) * piece : end - start - rank * piece])
    return np.concatenate(parts) if parts else None


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
