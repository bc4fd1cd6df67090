"""Rows of tensors for given tokens, whichever axes of a tensor count them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlprobe.compare.traininfer.passes import Grid
from rlprobe.compare.traininfer.tokens import Span
from rlprobe.dumps.tensors.dtypes import Array
from rlprobe.dumps.tensors.tensorfile import TensorFile


def rows(tensor: TensorFile, grid: Grid, spans: Sequence[Span], sequence_first: bool) -> Array:
    """Raw elements of the tokens of some spans, shape [tokens, width]; complex ones as they lie.

    Accepted are [rows, length, …], Megatron's [length, rows, …] and, with all tokens end to end,
    [tokens, …].

    Args:
        grid: the tokens of the pass that the tensor is of.
        sequence_first: which of the first two layouts it is where both fit.

    Raises:
        ValueError: no axes of the tensor count the tokens.
    """
    view = tensor.view()
    row = np.concatenate([np.full(len(span), span.row) for span in spans])
    column = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    batch, length = grid.rows, grid.length
    taken: Array
    if view.shape[:2] == (batch, length) and not (sequence_first and batch == length):
        taken = view[row, column]
    elif view.shape[:2] == (length, batch):
        taken = view[column, row]
    elif view.ndim and view.shape[0] == batch * length:
        taken = view[row * length + column]
    else:
        raise ValueError(
            f"no axis of its shape {list(view.shape)} counts the {batch} x {length} tokens of the "
            "pass"
        )
    return np.ascontiguousarray(taken).reshape(len(row), -1)


def as_tensor(tensor: TensorFile, values: Array) -> TensorFile:
    """Rows as a tensor of the type of the one they were taken from."""
    shape = (int(values.shape[0]), int(values.shape[1]))
    return TensorFile(tensor.dtype, shape, (shape[1], 1), values.reshape(-1), 0)
