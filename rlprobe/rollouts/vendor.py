"""Rollouts out of a vendor's dump, which has key data but no rollout file.

    DUMP/data/{prompts,responses,attention_mask,position_ids,input_ids}/
        step{N}/rank{R}/micro_step{M}/{name}.npy

is what msprobe's ``SingleSave`` leaves. It holds tokens and nothing else: no rewards, texts or
sampling settings, and rows lie in the order in which ranks and micro-batches met them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from rlprobe.errors import ReplayError
from rlprobe.rollouts.digest import prompt_digest
from rlprobe.rollouts.model import Rollouts, Sample, sample_ids

#: What ``meta["source"]`` says of rollouts read here.
SOURCE = "key data"
KEYS = ("prompts", "responses", "attention_mask", "position_ids", "input_ids")


def steps(dump_path: str | os.PathLike[str]) -> list[int]:
    """Steps of which every needed key is recorded.

    Raises:
        ReplayError: the dump has no ``data`` directory, or not every key in it.
    """
    data = Path(dump_path) / "data"
    if not data.is_dir():
        raise ReplayError(
            f"{dump_path} holds neither step{{N}}.h5 files nor data/; expected a directory of "
            "rollouts or a dump_path written with key_data_dump"
        )
    absent = [key for key in KEYS if not (data / key).is_dir()]
    if absent:
        raise ReplayError(
            f"{data}: {', '.join(absent)} missing; a replay needs {', '.join(KEYS)} "
            "(collect with key_data_dump: True)"
        )
    found = [set(_numbered(data / key, "step")) for key in KEYS]
    return sorted(set.intersection(*found))


def read_step(dump_path: str | os.PathLike[str], step: int) -> Rollouts:
    """One step's rows: ranks in order, within a rank its micro-batches in order.

    Ranks whose data are byte for byte those of an earlier rank (tensor- or pipeline-parallel
    peers, which see the same rows) are taken once; ``meta["duplicate_ranks"]`` lists the others.
    Sample ids come from the prompts' tokens, since the prompts' text is not in the dump.

    Raises:
        ReplayError: a key, rank, micro-batch or file is missing, unreadable or of another shape
            than its neighbours; the message names it.
    """
    data = Path(dump_path) / "data"
    _require_step(dump_path, step)
    ranks = _agreed(data, f"step{step}", "rank")
    kept: list[dict[str, np.ndarray]] = []
    duplicates = []
    for rank in ranks:
        place = f"step{step}/rank{rank}"
        micro_steps = _agreed(data, place, "micro_step")
        part = {
            key: _joined(
                [_load(data / key / place / f"micro_step{m}" / f"{key}.npy") for m in micro_steps],
                f"{data / key / place}",
            )
            for key in KEYS
        }
        if any(_equal(part, other) for other in kept):
            duplicates.append(rank)
        else:
            kept.append(part)
    tensors = {key: _joined([part[key] for part in kept], str(data / key)) for key in KEYS}
    _check_rows(tensors, data)
    rollouts = Rollouts(
        step=step,
        trainer_step=step + 1,
        tensors=dict(tensors),
        meta={"source": SOURCE, "duplicate_ranks": duplicates},
        samples=_samples(step, tensors),
    )
    rollouts.check()
    return rollouts


def _require_step(dump_path: str | os.PathLike[str], step: int) -> None:
    have = steps(dump_path)
    if step in have:
        return
    absent = [key for key in KEYS if not (Path(dump_path) / "data" / key / f"step{step}").is_dir()]
    raise ReplayError(
        f"{Path(dump_path) / 'data'}: step {step} has no {', '.join(absent)}; complete steps: "
        f"{', '.join(map(str, have)) or 'none'}"
    )


def _numbered(directory: Path, prefix: str) -> list[int]:
    pattern = re.compile(rf"{prefix}([0-9]{{1,9}})")
    matches = (pattern.fullmatch(entry.name) for entry in directory.iterdir() if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def _agreed(data: Path, place: str, prefix: str) -> list[int]:
    """Numbers of ``{prefix}{n}`` under a place, the same for every key."""
    per_key = {}
    for key in KEYS:
        directory = data / key / place
        per_key[key] = set(_numbered(directory, prefix)) if directory.is_dir() else set()
    union = set().union(*per_key.values())
    for key, numbers in per_key.items():
        if union - numbers:
            raise ReplayError(
                f"{data / key / place}: {prefix}{min(union - numbers)} is missing, which other "
                "keys have"
            )
    if not union:
        raise ReplayError(f"{data / KEYS[0] / place}: no {prefix}{{N}} directory")
    return sorted(union)


def _load(path: Path) -> np.ndarray:
    try:
        # Mapped, so that a header claiming more than the file holds allocates nothing.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise ReplayError(f"{path}: missing") from error
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise ReplayError(f"{path}: not a readable array ({error})") from error
    if not isinstance(array, np.ndarray) or array.ndim < 2 or array.dtype.kind not in "iub":
        raise ReplayError(f"{path}: expected integers of shape [rows, …, tokens]")
    return np.array(array)


def _joined(parts: list[np.ndarray], where: str) -> np.ndarray:
    first = parts[0]
    for part in parts[1:]:
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
            raise ReplayError(
                f"{where}: parts of one step differ in form, {first.dtype} [rows, "
                f"{_axes(first)}] against {part.dtype} [rows, {_axes(part)}]; only batches padded "
                "to one length can be replayed from key data"
            )
    return np.concatenate(parts)


def _axes(array: np.ndarray) -> str:
    return ", ".join(map(str, array.shape[1:]))


def _equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(a[key], b[key]) for key in KEYS)


def _check_rows(tensors: dict[str, np.ndarray], data: Path) -> None:
    rows = {key: tensor.shape[0] for key, tensor in tensors.items()}
    if len(set(rows.values())) != 1:
        raise ReplayError(f"{data}: keys have different numbers of rows: {rows}")
    width = tensors["prompts"].shape[1] + tensors["responses"].shape[1]
    for key in ("attention_mask", "input_ids"):
        if tensors[key].shape[1:] != (width,):
            raise ReplayError(
                f"{data / key}: rows have shape {list(tensors[key].shape[1:])}; prompts and "
                f"responses together have {width} tokens"
            )


def _samples(step: int, tensors: dict[str, np.ndarray]) -> list[Sample]:
    width = tensors["prompts"].shape[1]
    mask = tensors["attention_mask"].astype(bool)
    pairs = [
        (prompt[valid[:width]], response[valid[width:]])
        for prompt, response, valid in zip(
            tensors["prompts"], tensors["responses"], mask, strict=True
        )
    ]
    ids = sample_ids(step, [prompt_digest(prompt) for prompt, _ in pairs])
    return [
        Sample.build(id, "", prompt, response)
        for id, (prompt, response) in zip(ids, pairs, strict=True)
    ]
