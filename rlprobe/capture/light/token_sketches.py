"""Sketches per token of what every block puts out.

``{side}/token_sketches/{stage}-step{N}-rank{R}.npz`` (numpy arrays, no pickles) holds, a row per
token of every recorded block output:

- ``name``: index into ``names``, the record's full name (``Module.model.layers.0.….output.0``);
- ``micro_step``, ``sample``, ``token``: micro-batch, row of the batch and position in the row, all
  from 0. Packed batches are one row: their samples are told apart by the offsets of the key data
  ``input_ids`` of the same micro-step;
- ``sketch``: fp32, shape (rows, 17).

What a router chose stands beside them (``….output.chosen``): codes of the experts
(:mod:`rlprobe.capture.light.choices`), of tokens that lie as the blocks' of the micro-step do.

Besides: ``names``, ``k`` (17), and ``left_out``: tokens that the disk budget did not admit.

A token's sketch is that of its hidden vector alone: ``y[b] = sum of sign(j) * x[j]`` over the
``j`` of the hidden dimension with ``j mod 17 == b``, with the signs of :mod:`rlprobe.sketch`. An
estimate from 17 numbers has a standard deviation of 17 %. Log-probabilities need none: they are
key data, one number a token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlprobe.capture.engine import StageContext
from rlprobe.capture.light.sketches import device_signs
from rlprobe.capture.light.statistics import has_values
from rlprobe.files import written

#: Buckets of a token's sketch: a prime that divides no usual hidden size.
K = 17
_BYTES_PER_TOKEN = 4 * K + 16


def token_sketch(values: Tensor) -> Tensor:
    """Sketches along the last dimension; shape (tokens, 17), fp32, on the tensor's device."""
    width = values.shape[-1]
    flat = values.detach().reshape(-1, width)
    signed = flat * device_signs(width, flat.device)
    rows = -(-width // K)
    padded = torch.nn.functional.pad(signed, (0, rows * K - width))
    return padded.view(-1, rows, K).sum(1).to(torch.float32)


def is_block(path: str, module: nn.Module) -> bool:
    """Whether a module is one of a list of blocks: ``model.layers.3``, and it has parts."""
    return path.rpartition(".")[2].isdigit() and next(module.children(), None) is not None


class TokenSketches:
    """One stage's token sketches, growing entry by entry.

    Args:
        side: the session's side directory.
        context: stage, step and rank.
        budget: bytes that this file may take.
    """

    def __init__(self, side: Path, context: StageContext, budget: int) -> None:
        name = f"{context.stage}-step{context.step}-rank{context.rank}.npz"
        self.path = side / "token_sketches" / name
        self._budget = budget
        self._names: list[str] = []
        self._left_out = 0
        self._waiting: list[tuple[int, int, int, int, Tensor]] = []
        self._choices: list[tuple[str, int, Tensor]] = []
        self._rows: list[tuple[np.ndarray[Any, Any], ...]] = []

    def add(self, name: str, micro_step: int, output: Any) -> None:
        """Sketch the tokens of a block's output: the hidden states that the next block has.

        They are the first tensor of a tuple; an engine's block gives what it adds to the residual
        stream and that stream, whose sketches add up to the sum's.
        """
        parts = list(output) if isinstance(output, (list, tuple)) else [output]
        tensor = parts[0] if parts else None
        if not isinstance(tensor, Tensor) or tensor.dim() < 2 or not tensor.is_floating_point():
            return
        if not has_values(tensor):
            return
        stream = parts[1] if len(parts) == 2 else None
        if not isinstance(stream, Tensor) or (stream.shape, stream.dtype) != (
            tensor.shape,
            tensor.dtype,
        ):
            stream = None
        length = tensor.shape[-2]
        samples = tensor.numel() // tensor.shape[-1] // length
        size = samples * length * _BYTES_PER_TOKEN
        if size > self._budget:
            self._left_out += samples * length
            return
        self._budget -= size
        self._names.append(name)
        record = len(self._names) - 1
        rows = token_sketch(tensor)
        if stream is not None:
            rows = rows + token_sketch(stream)
        self._waiting.append((record, micro_step, samples, length, rows))

    def add_choice(self, name: str, micro_step: int, codes: Tensor) -> None:
        """Keep what a router chose; a router sees tokens one behind the other.

        Args:
            name: the record's.
            micro_step: as in :meth:`add`.
            codes: shape ``[tokens, 17]``.
        """
        self._choices.append((name, micro_step, codes))

    def _place_choices(self) -> None:
        """Give choices the places that the blocks' tokens of their micro-step have."""
        shapes = {(m, s * n): (s, n) for _, m, s, n, _ in self._waiting}
        for name, micro_step, codes in self._choices:
            samples, length = shapes.get((micro_step, len(codes)), (0, 0))
            size = len(codes) * _BYTES_PER_TOKEN
            if not samples or size > self._budget:
                self._left_out += len(codes)
                continue
            self._budget -= size
            self._names.append(name)
            self._waiting.append((len(self._names) - 1, micro_step, samples, length, codes))
        self._choices.clear()

    def publish(self) -> int:
        """Write the file with all entries so far; returns its size, 0 when there is nothing."""
        self._place_choices()
        for record, micro_step, samples, length, rows in self._waiting:
            count = samples * length
            self._rows.append(
                (
                    np.full(count, record, dtype=np.int32),
                    np.full(count, micro_step, dtype=np.int32),
                    np.repeat(np.arange(samples, dtype=np.int32), length),
                    np.tile(np.arange(length, dtype=np.int32), samples),
                    # an fp64 control widens casts to fp32 while its model runs, ours among them
                    rows.cpu().numpy().astype(np.float32, copy=False),
                )
            )
        self._waiting.clear()
        if not self._rows and not self._left_out:
            return 0
        columns = [np.concatenate(column) for column in zip(*self._rows, strict=True)]
        if not columns:
            columns = [np.zeros(0, dtype=np.int32)] * 4 + [np.zeros((0, K), dtype=np.float32)]
        with written(self.path) as temporary, temporary.open("wb") as handle:
            np.savez(
                handle,
                names=np.array(self._names, dtype=np.str_),
                name=columns[0],
                micro_step=columns[1],
                sample=columns[2],
                token=columns[3],
                sketch=columns[4],
                k=np.int32(K),
                left_out=np.int64(self._left_out),
            )
            return handle.tell()
