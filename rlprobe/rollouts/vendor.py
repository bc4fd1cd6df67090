"""Rollouts out of a vendor's dump, which has key data but no rollout file.

    DUMP/data/{prompts,responses,attention_mask,position_ids,input_ids}/
        step{N}/rank{R}/micro_step{M}/{name}.npy

is what msprobe's ``SingleSave`` leaves, ids turned to floats, or one of its other forms
(:mod:`.singlesave`). It holds tokens and nothing else: no rewards, texts or
sampling settings, and rows lie in the order in which ranks and micro-batches met them.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from rlprobe.documents import npyfile
from rlprobe.errors import DumpError, ReplayError
from rlprobe.rollouts import singlesave
from rlprobe.rollouts.digest import prompt_digest
from rlprobe.rollouts.model import Rollouts, Sample, sample_ids
from rlprobe.rollouts.singlesave import Saved

#: What ``meta["source"]`` says of rollouts read here.
SOURCE = "key data"
#: Largest array that is read: responses of a rank's micro-step.
_MAX_BYTES = 8 << 30
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
    found = [{n for n, _ in singlesave.numbered(data / key, "step")} for key in KEYS]
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
    files = _agreed(data, step)
    kept: list[dict[str, np.ndarray]] = []
    duplicates = []
    for rank in sorted({rank for rank, _ in files[KEYS[0]]}):
        place = f"step{step}/rank{rank}"
        part = {
            key: _joined(
                [_load(saved, key) for (r, _), saved in sorted(files[key].items()) if r == rank],
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


def _agreed(data: Path, step: int) -> dict[str, dict[tuple[int, int], Saved]]:
    """Each key's files by rank and micro-batch, the same of which every key has."""
    try:
        files = {key: singlesave.saved(data, key, step) for key in KEYS}
    except DumpError as error:
        raise ReplayError(str(error)) from error
    union = set().union(*files.values())
    for key, places in files.items():
        lacking = sorted(union - places.keys())
        if lacking:
            rank, micro = lacking[0]
            whole = not any(r == rank for r, _ in places)
            raise ReplayError(
                f"{data / key / f'step{step}'}: rank{rank}{'' if whole else f'/micro_step{micro}'} "
                f"has no {key}, which other keys have"
            )
    if not union:
        raise ReplayError(f"{data / KEYS[0] / f'step{step}'}: no rank{{R}} directory with an array")
    return files


def _load(saved: Saved, key: str) -> np.ndarray:
    """One micro-batch [rows, …, tokens] as integers."""
    parts = [_array(path, key) for path in saved.files]
    if not saved.parts:
        return parts[0]
    # a list's tensors are rows, or batches of rows
    rows = [part[np.newaxis] if part.ndim == 1 else part for part in parts]
    return _joined(rows, f"{saved.directory}")


def _array(path: Path, key: str) -> np.ndarray:
    try:
        array = npyfile.load(path, _MAX_BYTES)
        if array.ndim < 1:
            raise ValueError("expected an array of shape [rows, …, tokens]")
        return np.array(singlesave.whole_numbers(array, key))
    except ValueError as error:
        raise ReplayError(f"{path}: not a readable array of {key} ({error})") from error


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
    for key in ("prompts", "responses"):
        if tensors[key].ndim != 2:
            raise ReplayError(
                f"{data / key}: arrays have {tensors[key].ndim} axes; expected [rows, tokens]"
            )
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
