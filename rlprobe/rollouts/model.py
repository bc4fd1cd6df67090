"""One step's rollouts in memory."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlprobe.errors import ReplayError
from rlprobe.rollouts.digest import prompt_digest, response_digest, sample_digest

#: Element types numpy lacks, and the numpy type that carries their bits.
CARRIERS: dict[str, str] = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
}

#: Names of tensors and columns; they become names inside a file.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,127}")


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length along their first axis.

    Row ``i`` is ``values[offsets[i]:offsets[i + 1]]``; ``values`` has shape [total, …] and
    ``offsets`` is int64 of shape [rows + 1], from 0 to total and never falling.
    """

    values: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        offsets = np.ascontiguousarray(self.offsets, dtype=np.int64)
        object.__setattr__(self, "offsets", offsets)
        if offsets.ndim != 1 or offsets.size < 1 or self.values.ndim < 1:
            raise ReplayError("ragged rows need one-dimensional offsets and values with an axis")
        # Compared, not subtracted: differences of hostile int64 offsets may wrap around.
        falling = bool(np.any(offsets[1:] < offsets[:-1]))
        if offsets[0] != 0 or offsets[-1] != self.values.shape[0] or falling:
            raise ReplayError(
                f"ragged offsets must rise from 0 to {self.values.shape[0]}; found "
                f"{int(offsets[0])} to {int(offsets[-1])}{', falling in between' * falling}"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Any]) -> Ragged:
        """Join rows that agree in dtype and in all axes but the first."""
        arrays = [np.asarray(row) for row in rows]
        lengths = [array.shape[0] for array in arrays]
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        values = np.concatenate(arrays) if arrays else np.empty(0)
        return cls(values, offsets)

    def __len__(self) -> int:
        return int(self.offsets.size - 1)

    def row(self, index: int) -> np.ndarray:
        """Row ``index``, shape [its length, …]; a view."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True)
class Sample:
    """Who one row is: the same id and digests on every device that trains on it."""

    #: Unique within a step; from the prompt and its n-th repetition, never from the row.
    id: str
    prompt_identity: str
    prompt_digest: str
    response_digest: str
    sample_digest: str
    prompt_text: str = ""
    response_text: str = ""
    reward: float | None = None

    @classmethod
    def build(
        cls,
        id: str,
        prompt_identity: str,
        prompt_ids: Any,
        response_ids: Any,
        prompt_text: str = "",
        response_text: str = "",
        reward: float | None = None,
    ) -> Sample:
        """A sample from its valid token ids, shapes [prompt tokens] and [response tokens]."""
        return cls(
            id=id,
            prompt_identity=prompt_identity,
            prompt_digest=prompt_digest(prompt_ids),
            response_digest=response_digest(response_ids),
            sample_digest=sample_digest(prompt_ids, response_ids),
            prompt_text=prompt_text,
            response_text=response_text,
            reward=None if reward is None else float(reward),
        )


def sample_ids(step: int, identities: Sequence[str]) -> list[str]:
    """Ids for the rows of a step: ``s{step}-{12 digits of the prompt}-{n-th repetition}``.

    Rows are counted per prompt, so that shuffling different prompts changes no id.
    """
    seen: collections.Counter[str] = collections.Counter()
    ids = []
    for identity in identities:
        short = identity.rpartition(":")[2][:12]
        ids.append(f"s{step}-{short}-{seen[short]}")
        seen[short] += 1
    return ids


@dataclass(eq=False)
class Rollouts:
    """Everything the trainer got from generation in one step; row ``i`` is ``samples[i]``."""

    #: Counted from 0.
    step: int
    #: The trainer's own number of the same step.
    trainer_step: int
    #: Name to array of shape [rows, …] or to :class:`Ragged` rows. Log-probs of the inference
    #: engine are ``rollout_log_probs``.
    tensors: dict[str, np.ndarray | Ragged] = field(default_factory=dict)
    #: True element type of tensors that numpy cannot hold (see :data:`CARRIERS`).
    dtypes: dict[str, str] = field(default_factory=dict)
    #: Columns that are not tensors: one JSON value a row.
    values: dict[str, list[Any]] = field(default_factory=dict)
    #: numpy element type of those columns that were numeric arrays and must become so again.
    value_dtypes: dict[str, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    #: temperature, top_p, top_k, n, logprobs (``raw`` or ``processed``), engine.
    sampling: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.samples)

    def check(self) -> None:
        """Refuse what could not be replayed.

        Raises:
            ReplayError: rows disagree, ids repeat, a name cannot be stored, or a carrier type is
                wrong.
        """
        rows = len(self.samples)
        if self.step < 0:
            raise ReplayError(f"steps count from 0; found {self.step}")
        for name, tensor in self.tensors.items():
            _check_name(name)
            if not isinstance(tensor, Ragged) and np.ndim(tensor) == 0:
                raise ReplayError(f"tensor {name!r} has no rows: it is a scalar")
            if len(tensor) != rows:
                raise ReplayError(f"tensor {name!r} has {len(tensor)} rows, samples {rows}")
        for name, column in self.values.items():
            _check_name(name)
            if len(column) != rows:
                raise ReplayError(f"column {name!r} has {len(column)} rows, samples {rows}")
        both = set(self.tensors) & set(self.values)
        if both:
            raise ReplayError(f"{min(both)!r} is both a tensor and a column")
        for name, dtype in self.dtypes.items():
            self._check_carrier(name, dtype)
        unknown = set(self.value_dtypes) - set(self.values)
        if unknown:
            raise ReplayError(f"value_dtypes names {min(unknown)!r}, which is no column")
        ids = collections.Counter(sample.id for sample in self.samples)
        repeated = [id for id, times in ids.items() if times > 1]
        if repeated:
            raise ReplayError(f"sample id {repeated[0]!r} is used {ids[repeated[0]]} times")

    def _check_carrier(self, name: str, dtype: str) -> None:
        if name not in self.tensors:
            raise ReplayError(f"dtypes names {name!r}, which is no tensor")
        if dtype not in CARRIERS:
            raise ReplayError(
                f"tensor {name!r}: element type {dtype!r} is unknown; accepted: {sorted(CARRIERS)}"
            )
        tensor = self.tensors[name]
        found = (tensor.values if isinstance(tensor, Ragged) else tensor).dtype
        if found != np.dtype(CARRIERS[dtype]):
            raise ReplayError(
                f"tensor {name!r}: {dtype} is carried as {CARRIERS[dtype]}; found {found}"
            )


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ReplayError(
            f"{name!r} cannot name a tensor or column; use letters, digits, '_', '.' and '-', "
            "starting with a letter or '_'"
        )
