"""Where msprobe's ``SingleSave`` leaves arrays, in each of its forms.

    {key}/step{N}/rank{R}/micro_step{M}/{key}.npy     save, and save_ex with a micro-batch
    {key}/step{N}/rank{R}/{key}.npy                   save_ex without one: micro-batch 0
    …/{key}.0.npy, {key}.1.npy                        a list of tensors
    …/{key}.{name}.npy                                a dict of tensors
    …/response0.npy                                   the vendor's guide, under ``responses``

``SingleSave`` turns every tensor to float before it is written, token ids too.
"""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlprobe.errors import DumpError

_NUMBERED = {kind: re.compile(rf"{kind}(\d{{1,9}})") for kind in ("step", "rank", "micro_step")}

_TWICE = "a micro-batch is there twice, as {one} and as {other}: one of them is of another run"


@dataclass(frozen=True)
class Saved:
    """One key's files of one micro-batch."""

    directory: Path
    #: One file that is the whole, or the parts of a list in order.
    files: tuple[Path, ...]
    parts: bool = False


def numbered(directory: Path, kind: str) -> list[tuple[int, Path]]:
    """``{kind}{n}`` directories in order of their numbers; none where the directory is missing."""
    if not directory.is_dir():
        return []
    found = ((_NUMBERED[kind].fullmatch(p.name), p) for p in directory.iterdir() if p.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def names(data: Path) -> list[str]:
    """Keys of a ``data`` directory; of a dict of tensors ``{key}.{name}``, by its first step."""
    found = set()
    for key in (p for p in data.iterdir() if p.is_dir()):
        inner = {
            file.name[len(key.name) + 1 : -len(".npy")]
            for _, step in numbered(key, "step")[:1]
            for file in step.rglob(f"{glob.escape(key.name)}.*.npy")
        }
        inside = {name for name in inner if name and not name.isdecimal()}
        found |= {f"{key.name}.{name}" for name in inside} or {key.name}
    return sorted(found)


def saved(data: Path, key: str, step: int) -> dict[tuple[int, int], Saved]:
    """Files of a key at a step, by rank and micro-batch; only where there are any.

    Raises:
        DumpError: a micro-batch is there twice, in two forms, and nothing says which one is meant.
    """
    directory = data / key
    if not directory.is_dir() and "." in key:
        directory = data / key.split(".", 1)[0]
    found: dict[tuple[int, int], Saved] = {}
    for rank, place in numbered(directory / f"step{step}", "rank"):
        for micro, inner in [(0, place), *numbered(place, "micro_step")]:
            files = _files(inner, key)
            if files is not None and (rank, micro) in found:
                other = found[rank, micro].files[0]
                raise DumpError(_TWICE.format(one=other, other=files.files[0]))
            if files is not None:
                found[rank, micro] = files
    return found


def _files(directory: Path, key: str) -> Saved | None:
    arrays = sorted(p for p in directory.iterdir() if p.suffix == ".npy")
    whole = directory / f"{key}.npy"
    stems = (re.escape(key), re.escape(key.removesuffix("s")))
    part = re.compile(rf"(?:{stems[0]}\.|{stems[0]}|{stems[1]})(\d{{1,9}})\.npy")
    numbers: dict[int, Path] = {}
    for path in arrays:
        if match := part.fullmatch(path.name):
            number = int(match[1])
            if number in numbers:  # responses.0.npy and response0.npy
                raise DumpError(_TWICE.format(one=numbers[number], other=path))
            numbers[number] = path
    if whole in arrays:
        if numbers:
            raise DumpError(_TWICE.format(one=whole, other=numbers[min(numbers)]))
        return Saved(directory, (whole,))
    if not numbers:
        return None
    ordered = tuple(numbers[n] for n in sorted(numbers))
    return Saved(directory, ordered, parts=True)


def whole_numbers(array: npt.NDArray[Any], key: str) -> npt.NDArray[Any]:
    """Ids as integers, whatever they were saved as.

    Raises:
        ValueError: a number is not whole, or too large for its type to hold every id.
    """
    if array.dtype.kind in "iub":
        return array
    if array.dtype.kind != "f":
        raise ValueError(f"{key} holds {array.dtype}; ids are whole numbers")
    exact = 1 << (np.finfo(array.dtype).nmant + 1)
    wrong = ~np.isfinite(array) | (np.trunc(array) != array)
    if wrong.any():
        raise ValueError(f"{key} holds {array[wrong].ravel()[0]:g}; ids are whole numbers")
    if array.size and np.abs(array).max() > exact:
        raise ValueError(
            f"{key} holds {np.abs(array).max():.0f} as {array.dtype}, which has only every other "
            f"whole number beyond {exact}: ids saved so are not known exactly"
        )
    return array.astype(np.int64)
