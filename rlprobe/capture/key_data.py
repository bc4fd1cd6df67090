"""Key data: what a step computes with, as arrays and statistics.

``{dump}/data/{name}/step{N}/rank{R}/micro_step{M}/{name}.npy`` and ``{name}.json``, as msprobe's
``SingleSave.save`` writes and ``SingleComparator.compare`` reads them (mindstudio-probe 26,
``core/single_save``). The JSON is ``{"data": {"max", "min", "mean", "norm", "shape", "dtype"}}``;
``dtype`` is the tensor's own, which the array may not have: bfloat16 and float16 become float32,
booleans int8 (numpy cannot subtract them), unsigned integers int64.

Ragged batches: a nested tensor, or a list of rows of different lengths, is stored as its values
laid end to end along the first dimension, with ``"offsets": [0, n0, n0 + n1, …]`` in the JSON.
A row's sample (the digest of its tokens) stands in ``"samples"`` where the micro-batch of a stage
other than the log-prob stage holds its tokens: its order may be another than that of the batch.
Padding never enters: rows would otherwise be compared with rows of other lengths.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlprobe.capture.files import write_json
from rlprobe.errors import UsageError
from rlprobe.files import written

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

Array = npt.NDArray[Any]


def write(
    root: Path,
    name: str,
    step: int,
    rank: int,
    micro_step: int,
    value: Any,
    samples: Sequence[str] = (),
) -> tuple[Path, int]:
    """Write one array and its statistics.

    Args:
        root: the dump directory (``data/`` goes below it).
        name: letters, digits, ``_``, ``-`` and ``.``, no leading dot.
        step, rank, micro_step: captured step, rank and micro-batch, from 0.
        value: a tensor of any device (nested and DTensor included: the local part), an array, or
            a list of rows that may differ in length.
        samples: which sample each row is of, where the micro-batch says so.

    Returns:
        the directory, and the bytes written.

    Raises:
        UsageError: the name could leave the directory, or the value is no array.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"key data name {name!r}: use letters, digits, '_', '-' and '.', no leading dot or dash"
        )
    array, dtype, offsets = as_array(name, value)
    directory = root / "data" / name / f"step{step}" / f"rank{rank}" / f"micro_step{micro_step}"
    with written(directory / f"{name}.npy") as temporary:
        with temporary.open("wb") as handle:
            np.save(handle, array, allow_pickle=False)
        size = temporary.stat().st_size
    document: dict[str, Any] = {**statistics(array), "shape": list(array.shape), "dtype": dtype}
    if offsets is not None:
        document["offsets"] = offsets
    if samples:
        document["samples"] = list(samples)
    size += write_json(directory / f"{name}.json", {"data": document}, indent=4)
    return directory, size


def as_array(name: str, value: Any) -> tuple[Array, str, list[int] | None]:
    """``value`` as a plain array, the name of its own dtype, and row offsets when ragged.

    Raises:
        UsageError: not numbers.
    """
    offsets: list[int] | None = None
    if isinstance(value, (list, tuple)):
        value, offsets = _joined(name, value)
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", value).detach()
        if local.is_nested:
            local, offsets = _flattened(local)
        dtype = str(local.dtype)
        if local.is_floating_point() and local.dtype.itemsize < 4:
            local = local.float()
        array = local.cpu().contiguous().numpy()
    elif isinstance(value, np.ndarray):
        array, dtype = value, str(value.dtype)
    else:
        raise UsageError(f"key data {name!r}: a tensor or an array is needed, found {type(value)}")
    return _comparable(name, array), dtype, offsets


def _comparable(name: str, array: Array) -> Array:
    """A dtype that numpy can subtract without wrapping around."""
    kind = array.dtype.kind
    if kind == "b":
        return array.astype(np.int8)
    if kind == "u":
        return array.astype(np.int64)
    if kind == "f" and array.dtype.itemsize < 4:
        return array.astype(np.float32)
    if kind not in "if":
        raise UsageError(f"key data {name!r}: numbers are needed, found dtype {array.dtype}")
    return array


def _flattened(nested: Tensor) -> tuple[Tensor, list[int]]:
    """Values of a nested tensor end to end, and where each row begins."""
    if nested.layout == torch.jagged:
        lengths = getattr(nested, "lengths", lambda: None)()
        starts = nested.offsets().tolist()
        values = nested.values()
        if lengths is None:
            return values, [int(n) for n in starts]
        rows = [
            values[start : start + length]
            for start, length in zip(starts, lengths.tolist(), strict=False)
        ]
    else:
        rows = list(nested.unbind())
    return torch.cat([row.reshape(-1) for row in rows]), _offsets([r.numel() for r in rows])


def _joined(name: str, rows: Sequence[Any]) -> tuple[Array | Tensor, list[int]]:
    """Rows of different lengths end to end."""
    if rows and all(isinstance(row, Tensor) for row in rows):
        parts = [row.detach() for row in rows]
        return torch.cat(parts), _offsets([len(part) for part in parts])
    try:
        arrays = [np.atleast_1d(np.asarray(row)) for row in rows]
        joined = np.concatenate(arrays) if arrays else np.zeros(0)
    except ValueError as error:
        raise UsageError(f"key data {name!r}: rows do not fit together: {error}") from error
    return joined, _offsets([len(row) for row in arrays])


def _offsets(lengths: Sequence[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + int(length))
    return found


def statistics(array: Array) -> dict[str, float | None]:
    """Max, min, mean and L2 norm in fp64, under the vendor's keys; null for an empty array."""
    if array.size == 0:
        return {"max": None, "min": None, "mean": None, "norm": None}
    wide = array.astype(np.float64)
    return {
        "max": float(wide.max()),
        "min": float(wide.min()),
        "mean": float(wide.mean()),
        "norm": float(np.linalg.norm(wide.reshape(-1))),
    }
