"""verl's own saved rollouts as rollouts that a run replays.

Of ``skip.rollout`` a step is one pickled DataProto with everything the trainer got; it is read as
data and never loaded (:mod:`.plain`). ``rollout_data_dir`` has texts, and tokenising a text again
need not give the tokens that were generated; the newer trainer's ``skip.rollout_tq`` has rows
without an order: neither can be replayed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlprobe.dumps.rollouts import folder, plain
from rlprobe.dumps.rollouts.folder import Folder
from rlprobe.dumps.rollouts.plain import Array, DataProto
from rlprobe.dumps.tensors.tensorfile import TensorFileError, map_file
from rlprobe.errors import DumpError, ReplayError
from rlprobe.rollouts import Rollouts, Sample, sample_ids
from rlprobe.rollouts.digest import prompt_digest
from rlprobe.rollouts.model import CARRIERS, NAME

#: What ``meta["source"]`` says of rollouts read here.
SOURCE = "verl's skip.rollout"
_NEEDED = ("prompts", "responses", "attention_mask", "position_ids", "input_ids")
_VERLS = "they have texts without their tokens, or rows without an order"
_SLIMES = "slime loads them itself (--load-debug-rollout-data)"
_INSTEAD = (
    "save them with skip.rollout (verl's RolloutSkip), or name a directory of step{N}.h5 files, "
    "or a dump_path with key data"
)


def found(path: Path) -> Folder | None:
    """The rollouts of verl's own that a directory holds and a run can replay; None for none.

    Raises:
        ReplayError: it holds some that cannot be replayed, or of two kinds.
    """
    try:
        there = folder.find(path)
    except DumpError as error:
        raise ReplayError(str(error)) from error
    if there is not None and there.kind is not folder.SKIP:
        why = _SLIMES if there.kind is folder.SLIME else f"{_VERLS}; {_INSTEAD}"
        raise ReplayError(f"{path} holds {there.kind.name}, which cannot be replayed: {why}")
    return there


def read(there: Folder, number: int, step: int) -> Rollouts:
    """One step.

    Args:
        there: of :func:`found`.
        number: the trainer's own number of the step.
        step: the step that it is replayed as, from 0.

    Raises:
        ReplayError: it is not there, or the file is no batch that a trainer could go on with.
    """
    if number not in there.steps:
        have = ", ".join(map(str, there.steps)) or "none"
        raise ReplayError(f"step {number} is not among verl's saved rollouts; there are {have}")
    (path,) = there.steps[number]
    batch = _batch(path)
    tensors: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for name, value in _named(batch.batch).items():
        if isinstance(value, Array):
            tensors[name], carrier = _numbers(value, path, name)
            if carrier:
                dtypes[name] = carrier
    _check(tensors, path)
    values: dict[str, list[Any]] = {}
    kinds: dict[str, str] = {}
    left = []
    for name, column in _named(batch.non_tensors).items():
        rows = _column(column)
        if rows is None or len(rows) != len(tensors["prompts"]):
            left.append(name)
        else:
            values[name] = rows
            if isinstance(column, Array) and column.raw.dtype.kind in "if":
                kinds[name] = str(column.raw.dtype)
    rollouts = Rollouts(
        step=step,
        trainer_step=number,
        tensors=tensors,
        dtypes=dtypes,
        values=values,
        value_dtypes=kinds,
        meta={"source": SOURCE, "meta_info": {}, "not_recorded": sorted(left)},
        samples=_samples(step, tensors),
    )
    rollouts.check()
    return rollouts


def _batch(path: Path) -> DataProto:
    try:
        batch = plain.read_pickle(map_file(path))
    except (OSError, TensorFileError, ValueError, RecursionError, MemoryError) as error:
        raise ReplayError(f"{path} is not read: {error}") from error
    if not isinstance(batch, DataProto):
        raise ReplayError(f"{path} holds no DataProto of verl")
    return batch


def _named(columns: Any) -> dict[str, Any]:
    """Columns whose names a recording can hold."""
    if not isinstance(columns, Mapping):
        return {}
    return {
        name: v for name, v in columns.items() if isinstance(name, str) and NAME.fullmatch(name)
    }


def _numbers(value: Array, path: Path, name: str) -> tuple[np.ndarray, str | None]:
    carrier = CARRIERS.get(value.dtype.name)
    raw = np.ascontiguousarray(value.raw)
    if carrier is not None:
        return raw.view(carrier), value.dtype.name
    if raw.dtype.kind not in "biuf":
        raise ReplayError(f"{path}: {name} holds {value.dtype.name}, which no recording can")
    return raw, None


def _column(column: Any) -> list[Any] | None:
    """A column of one JSON value a row; None where it is none."""
    rows = column.raw.tolist() if isinstance(column, Array) and column.raw.ndim else column
    if not isinstance(rows, list):
        return None
    try:
        json.dumps(rows, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return rows


def _check(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    lacking = [name for name in _NEEDED if name not in tensors]
    if lacking:
        raise ReplayError(f"{path} has no {', '.join(lacking)}; {_INSTEAD}")
    prompts, responses, mask = (tensors[n] for n in ("prompts", "responses", "attention_mask"))
    if prompts.ndim != 2 or responses.ndim != 2:
        raise ReplayError(f"{path}: prompts and responses are no batch of padded rows")
    width = prompts.shape[1] + responses.shape[1]
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or len(tensor) != len(prompts):
            raise ReplayError(f"{path}: {name} has not one row for each of {len(prompts)} prompts")
    if mask.shape != (len(prompts), width) or tensors["input_ids"].shape != mask.shape:
        raise ReplayError(
            f"{path}: attention_mask and input_ids are not as wide as prompts and responses "
            f"together ({width})"
        )
    for name in ("prompts", "responses", "input_ids"):
        if tensors[name].dtype.kind not in "iu":
            raise ReplayError(f"{path}: {name} holds {tensors[name].dtype}, no token ids")


def _samples(step: int, tensors: Mapping[str, np.ndarray]) -> list[Sample]:
    width = tensors["prompts"].shape[1]
    mask = tensors["attention_mask"].astype(bool)
    pairs = [
        (prompt[valid[:width]], response[valid[width:]])
        for prompt, response, valid in zip(
            tensors["prompts"], tensors["responses"], mask, strict=True
        )
    ]
    rewards = tensors.get("rm_scores")
    ids = sample_ids(step, [prompt_digest(prompt) for prompt, _ in pairs])
    return [
        Sample.build(
            id, "", prompt, response,
            reward=None if rewards is None else float(rewards[row].sum()),
        )
        for row, (id, (prompt, response)) in enumerate(zip(ids, pairs, strict=True))
    ]  # fmt: skip
