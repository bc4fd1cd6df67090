"""Key data of one side as rows: ``data/{key}/step{N}/rank{R}/micro_step{M}/{key}.{npy,json}``.

What msprobe's ``SingleSave`` writes, in any of its forms (:mod:`rlprobe.rollouts.singlesave`);
``offsets`` in the JSON tell rows of different lengths apart
(:mod:`rlprobe.capture.key_data`). A row is one sample's values. Which sample, follows from the
digest of its valid prompt and response tokens, found in the key data ``prompts``, ``responses`` and
``attention_mask`` of the same micro-batch; or it stands beside the values; or, where a stage's
micro-batches have neither, it follows from the order of samples in the mock proof. Nothing is named
by its position alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlprobe import stages
from rlprobe.documents import jsonfile, npyfile
from rlprobe.documents.limits import DocumentError
from rlprobe.dumps.proof import Entry
from rlprobe.errors import DumpError, ReplayError
from rlprobe.rollouts import singlesave
from rlprobe.rollouts.digest import sample_digest
from rlprobe.rollouts.singlesave import Saved

Array = npt.NDArray[Any]

#: Key data that a stage computes, and the stage.
OUTCOMES: dict[str, str] = {
    "forced_prefill_log_probs": stages.FORCED,
    "forced_decode_log_probs": stages.FORCED,
    "ref_log_prob": stages.REFERENCE,
    "ref_log_probs": stages.REFERENCE,
    "teacher_log_probs": stages.TEACHER,
    "old_log_probs": stages.LOG_PROB,
    "entropys": stages.LOG_PROB,
    "values": stages.VALUES,
    "update_log_probs": stages.ACTOR_UPDATE,
    "update_entropys": stages.ACTOR_UPDATE,
    "update_values": stages.CRITIC_UPDATE,
}
#: Key data that stages are given: what they are copies of, None where another computation made
#: them, and the stage.
GIVEN: dict[str, tuple[str | None, str]] = {
    "given_old_log_probs": ("old_log_probs", stages.ACTOR_UPDATE),
    "given_ref_log_prob": ("ref_log_prob", stages.ACTOR_UPDATE),
    "given_actor_mask": (None, stages.ACTOR_UPDATE),
    "given_values": ("values", stages.CRITIC_UPDATE),
    "given_returns": (None, stages.CRITIC_UPDATE),
    "given_critic_mask": (None, stages.CRITIC_UPDATE),
}
REWARDS, ADVANTAGES = "token_level_rewards", "advantages"
PROMPTS, RESPONSES, MASK, INPUT_IDS = "prompts", "responses", "attention_mask", "input_ids"
TOKENS = (INPUT_IDS, PROMPTS, RESPONSES, MASK, "position_ids")
#: What an engine would have chosen at each forced token, and by how much: a choice follows its
#: log-probs by a comparison, so that it says nothing by itself.
CHOICES: dict[str, str] = {
    f"forced_{phase}_{what}": stages.FORCED
    for phase in ("prefill", "decode")
    for what in ("choices", "margins")
}
#: Stages of the other keys; what is in neither table belongs to the log-prob stage.
_GIVEN = dict.fromkeys((REWARDS, ADVANTAGES, "rewards", "returns", "kl"), stages.ACTOR_UPDATE)
#: A key that is written only where one schedule of micro-batches serves every stage, so that the
#: tokens of a micro-batch are those of all its key data.
_ONE_SCHEDULE = "loss_mask"
_NOT_OF_SAMPLES = "_grad_norm"
#: Larger arrays of one micro-batch are refused.
MAX_BYTES = 4 << 30
#: Of which rank and micro-step a micro-batch is.
BatchKey = tuple[int, int]


def stage_of(key: str) -> str:
    """The stage whose micro-batches a key's values are of."""
    if key in GIVEN:
        return GIVEN[key][1]
    return OUTCOMES.get(key) or CHOICES.get(key) or _GIVEN.get(key, stages.LOG_PROB)


@dataclass(frozen=True)
class Row:
    """One sample's values of one key; valid tokens only where the key is per token."""

    #: Its digest; None where nothing tells which sample it is.
    sample: str | None
    values: Array
    rank: int
    micro_step: int
    index: int = 0
    #: Where the response's part begins; None where that is unknown.
    response_at: int | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Which samples a micro-batch holds, and which positions of its padded rows are tokens."""

    samples: list[str] = field(default_factory=list)
    #: Valid tokens of each prompt and response.
    prompts: list[int] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)
    #: Shape [rows, width]; None where rows are ragged and have no padding.
    valid: Array | None = None
    #: Positions of a padded response.
    response_width: int = 0
    #: Whether the model was given its rows end to end, or padded to the longest on the right.
    ragged: bool = False

    def trimmed(self, row: Array, index: int, key: str) -> Array:
        """The valid part of a padded row over the prompt, the response or both."""
        if self.valid is None or index >= len(self.valid) or row.ndim != 1:
            return row
        mask = self.valid[index]
        if key == PROMPTS:
            fits = len(row) == len(mask) - self.response_width
            return row[mask[: len(row)]] if fits else row
        # over the sequence, over what is predicted of it, or over the responses at its end
        if len(row) not in (len(mask), len(mask) - 1, self.response_width):
            return row
        part: Array = row[mask[len(mask) - len(row) :]]
        return part

    def response_at(self, length: int, index: int) -> int | None:
        """Entry of a row of so many valid values at which the response begins.

        Over a sequence, entry i is about token i + 1, so the response begins one early.
        """
        response = self.responses[index]
        if length == response:
            return 0
        return length - response - 1 if length > response else None


class KeyData:
    """The key data of one side.

    Args:
        data: its ``data`` directory.
        proof: entries of its mock proof.
    """

    def __init__(self, data: Path, proof: Iterable[Entry] = ()) -> None:
        self.data = data
        self.proof = list(proof)
        self._batches: dict[int, dict[BatchKey, MicroBatch]] = {}
        self._files: dict[tuple[str, int], dict[BatchKey, Saved]] = {}

    def keys(self) -> list[str]:
        """Names of what was recorded of samples (gradient norms are of parameter groups)."""
        return [name for name in self._names if not name.endswith(_NOT_OF_SAMPLES)]

    def _saved(self, key: str, step: int) -> dict[BatchKey, Saved]:
        if (key, step) not in self._files:
            self._files[key, step] = singlesave.saved(self.data, key, step)
        return self._files[key, step]

    @cached_property
    def _names(self) -> list[str]:
        return singlesave.names(self.data)

    def keys_of(self, step: int) -> list[str]:
        """Names of what was recorded of samples at a step."""
        places = {key: (self.data / key, self.data / key.split(".", 1)[0]) for key in self.keys()}
        return [
            key
            for key, own in places.items()
            if any((place / f"step{step}").is_dir() for place in own)
        ]

    def steps(self) -> list[int]:
        """Steps of which anything was recorded."""
        places = {self.data / key.split(".", 1)[0] for key in self.keys()}
        places |= {self.data / key for key in self.keys()}
        return sorted({n for place in places for n, _ in singlesave.numbered(place, "step")})

    def micro_batches(self, step: int) -> dict[BatchKey, MicroBatch]:
        """The micro-batches whose tokens were recorded.

        Raises:
            DumpError: a file is damaged.
        """
        if step not in self._batches:
            self._batches[step] = self._read_batches(step)
        return self._batches[step]

    def rows(self, key: str, step: int) -> list[Row]:
        """All rows of a key in order of rank, micro-step and place.

        Raises:
            DumpError: a file is damaged.
        """
        batches = self.micro_batches(step)
        own = stage_of(key) == stages.LOG_PROB or (self.data / _ONE_SCHEDULE).is_dir()
        known = _rows_of_samples(batches)
        found: list[Row] = []
        for (rank, micro), values in sorted(self.arrays(key, step).items()):
            batch = batches.get((rank, micro), MicroBatch())
            named = own and len(batch.samples) == len(values)
            samples = [] if named else self._samples(key, step, rank, micro)
            for index, value in enumerate(values):
                if len(samples) == len(values):
                    row = Row(None, value, rank, micro, index)
                    found.append(self._of_sample(row, samples[index], key, known))
                    continue
                if not named:
                    found.append(Row(None, value, rank, micro, index))
                    continue
                part = batch.trimmed(value, index, key)
                begin = batch.response_at(len(part), index)
                found.append(Row(batch.samples[index], part, rank, micro, index, begin))
        if any(row.sample is None for row in found):
            return self._named_by_proof(found, key, step)
        return found

    def order(self, stage: str, step: int) -> dict[int, list[str]]:
        """By rank, the samples that a stage worked on, in the order of its batches."""
        found: dict[int, list[str]] = {}
        for entry in self.proof:
            if entry["step"] == step and entry["stage"] == stage:
                found.setdefault(entry["rank"], []).extend(entry["samples"])
        return found

    def arrays(self, key: str, step: int) -> dict[BatchKey, list[Array]]:
        """Rows of every micro-batch, untrimmed.

        Raises:
            DumpError: a file is damaged.
        """
        return {at: _rows(files, key) for at, files in self._saved(key, step).items()}

    def _read_batches(self, step: int) -> dict[BatchKey, MicroBatch]:
        prompts, responses, masks, inputs = (
            self.arrays(key, step) for key in (PROMPTS, RESPONSES, MASK, INPUT_IDS)
        )
        found = {}
        for at in prompts.keys() & responses.keys():
            batch = self._batch(prompts[at], responses[at], masks.get(at))
            if batch is None:
                continue
            lengths = [p + r for p, r in zip(batch.prompts, batch.responses, strict=True)]
            ragged = [len(row) for row in inputs.get(at, ())] == lengths
            found[at] = replace(batch, ragged=ragged)
        return found

    def _batch(
        self, prompts: list[Array], responses: list[Array], mask: list[Array] | None
    ) -> MicroBatch | None:
        if len(prompts) != len(responses):
            return None
        valid = _valid(mask, prompts, responses)
        width = len(responses[0]) if valid is not None else 0
        padded = MicroBatch(valid=valid, response_width=width)
        batch = replace(padded, samples=[], prompts=[], responses=[])
        for index, pair in enumerate(zip(prompts, responses, strict=True)):
            prompt, response = (
                padded.trimmed(row, index, key)
                for row, key in zip(pair, (PROMPTS, RESPONSES), strict=True)
            )
            try:
                batch.samples.append(sample_digest(prompt, response))
            except ReplayError as error:
                raise DumpError(f"{self.data}: prompts and responses: {error}") from error
            batch.prompts.append(len(prompt))
            batch.responses.append(len(response))
        return batch

    def _named_by_proof(self, found: list[Row], key: str, step: int) -> list[Row]:
        order = self.order(stage_of(key), step)
        known = _rows_of_samples(self.micro_batches(step))
        named = []
        for rank, own in itertools.groupby(found, key=lambda row: row.rank):
            rows = list(own)
            samples = order.get(rank, [])
            if len(samples) != len(rows):
                named += rows
                continue
            named += [
                self._of_sample(row, sample, key, known)
                for row, sample in zip(rows, samples, strict=True)
            ]
        return named

    @staticmethod
    def _of_sample(row: Row, sample: str, key: str, known: Mapping[str, _BatchRow]) -> Row:
        """A row whose sample is known, without its padding where the sample's tokens are."""
        if stage_of(key) == stages.FORCED:  # never padded, and of the response's tokens alone
            return replace(row, sample=sample, response_at=0)
        batch, index = known.get(sample, (None, 0))
        if batch is None:
            return replace(row, sample=sample)
        part = batch.trimmed(row.values, index, key)
        begin = batch.response_at(len(part), index)
        return replace(row, sample=sample, values=part, response_at=begin)

    def _samples(self, key: str, step: int, rank: int, micro: int) -> list[str]:
        """The samples that stand beside a micro-batch's values; empty where none do."""
        saved = self._saved(key, step).get((rank, micro))
        if saved is None or saved.parts:
            return []
        directory = saved.directory
        samples = _described(directory, key).get("samples", [])
        if not isinstance(samples, list) or not all(isinstance(s, str) for s in samples):
            raise DumpError(f"{directory / key}.json: its samples are no list of digests")
        return samples


#: A micro-batch and a row of it.
_BatchRow = tuple[MicroBatch, int]


def _rows_of_samples(batches: Mapping[BatchKey, MicroBatch]) -> dict[str, _BatchRow]:
    """Where each sample's tokens are."""
    return {
        sample: (batch, index)
        for batch in batches.values()
        for index, sample in enumerate(batch.samples)
    }


def _valid(mask: list[Array] | None, prompts: list[Array], responses: list[Array]) -> Array | None:
    """A mask that fits padded prompts and responses; None for ragged rows."""
    widths = {len(p) + len(r) for p, r in zip(prompts, responses, strict=True)}
    if mask is None or len(mask) != len(prompts) or {len(row) for row in mask} != widths:
        return None
    return np.stack([row.astype(bool) for row in mask]) if len(widths) == 1 else None


def _described(directory: Path, key: str) -> dict[str, Any]:
    """What stands in the JSON beside an array; empty where there is none."""
    path = directory / f"{key}.json"
    try:
        whole = jsonfile.load(path, nonfinite=True) if path.is_file() else {}
        found = jsonfile.mapping(whole).get("data", {})
    except DocumentError as error:
        raise DumpError(f"{path} is not key data: {error}") from error
    if not isinstance(found, dict):
        raise DumpError(f"{path} is not key data: its data is no object")
    return found


def _rows(saved: Saved, key: str) -> list[Array]:
    """The rows of one micro-batch."""
    found: list[Array] = []
    for path in saved.files:
        try:
            array = _loaded(path)
            if key in TOKENS:
                array = singlesave.whole_numbers(array, key)
            if saved.parts and array.ndim < 2:
                # a list of rows, one file each
                found.append(np.atleast_1d(array))
            elif saved.parts:
                found += list(array)
            else:
                found += _cut(array, saved.directory, key)
        except (OSError, ValueError, TypeError, AttributeError, EOFError, RecursionError) as error:
            raise DumpError(f"{path} is not key data of {key}: {error}") from error
    return found


def _loaded(path: Path) -> Array:
    array = npyfile.load(path, MAX_BYTES)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"it holds {array.dtype}")
    return array


def _cut(array: Array, directory: Path, key: str) -> list[Array]:
    """Rows of different lengths by the offsets beside them, else along the first axis."""
    offsets = _described(directory, key).get("offsets")
    if offsets is None:
        return [np.atleast_1d(row) for row in np.atleast_1d(array)]
    bounds = np.asarray(offsets)
    if bounds.ndim != 1 or bounds.dtype.kind != "i" or (np.diff(bounds) < 0).any():
        raise ValueError("its offsets are not in order")
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > len(array)):
        raise ValueError("its offsets lie outside it")
    return [array[a:b] for a, b in itertools.pairwise(bounds)]
