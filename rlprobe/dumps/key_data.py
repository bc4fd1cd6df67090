"""Key data of one side as rows: ``data/{key}/step{N}/rank{R}/micro_step{M}/{key}.{npy,json}``.

What msprobe's ``SingleSave`` writes, in any of its forms (:mod:`rlprobe.rollouts.singlesave`);
``offsets`` in the JSON tell rows of different lengths apart
(:mod:`rlprobe.capture.key_data`). A row is one sample's values. Which sample, follows from the
digest of its valid prompt and response tokens, found in the key data ``prompts``, ``responses`` and
``attention_mask`` of the same micro-batch; or it stands beside the values; or, where a stage's
micro-batches have neither, it follows from the order of samples in the mock proof. Nothing is named
by its position alone. A single number of a micro-batch of several samples is of all of them
together: it is named by them, in any order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlprobe import stages
from rlprobe.documents import npyfile
from rlprobe.dumps import beside
from rlprobe.dumps.key_names import (
    GRADIENT_NORM,
    INPUT_IDS,
    MASK,
    ONE_SCHEDULE,
    PROMPTS,
    RESPONSES,
    TOKENS,
    stage_of,
)
from rlprobe.dumps.proof import Entry
from rlprobe.errors import DumpError, ReplayError
from rlprobe.rollouts import singlesave
from rlprobe.rollouts.digest import sample_digest
from rlprobe.rollouts.singlesave import Saved
from rlprobe.terminal import counted

Array = npt.NDArray[Any]

#: Larger arrays of one micro-batch are refused.
MAX_BYTES = 4 << 30
#: What reading a file of somebody else's ends in.
_DAMAGED = (OSError, ValueError, TypeError, AttributeError, EOFError, RecursionError)
#: Of which rank and micro-step a micro-batch is.
BatchKey = tuple[int, int]


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
    #: Format of the tensor where its file has a wider one, and of ids that are kept as
    #: floating-point numbers; empty: that of the values.
    format: str = ""
    #: How many samples the value is of: more than one where it is a number of a whole micro-batch,
    #: and :attr:`sample` the digest of theirs.
    of: int = 1


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
        self._contradicted: dict[int, dict[str, str]] = {}
        self._held: dict[tuple[str, int], frozenset[str | None]] = {}

    def keys(self) -> list[str]:
        """Names of what was recorded of samples (gradient norms are of parameter groups)."""
        return [name for name in self._names if not name.endswith(GRADIENT_NORM)]

    def norms(self) -> list[str]:
        """Names of norms of gradients, which are of parameter groups and updates."""
        return [name for name in self._names if name.endswith(GRADIENT_NORM)]

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
        own = self._of_the_tokens(key)
        known = _rows_of_samples(batches)
        found: list[Row] = []
        for (rank, micro), values in sorted(self.arrays(key, step).items()):
            batch = batches.get((rank, micro), MicroBatch())
            named = own and len(batch.samples) == len(values)
            kept = self._format(key, step, (rank, micro))
            samples = [] if named else self._samples(key, step, rank, micro)
            together = samples or (batch.samples if own else [])
            if len(together) > 1 and self._of_all(key, step, (rank, micro), values):
                name, count = _together(together), len(together)
                found.append(Row(name, values[0], rank, micro, format=kept, of=count))
                continue
            for index, value in enumerate(values):
                if len(samples) == len(values):
                    row = Row(None, value, rank, micro, index, format=kept)
                    found.append(self._of_sample(row, samples[index], key, known))
                    continue
                if not named:
                    found.append(Row(None, value, rank, micro, index, format=kept))
                    continue
                part = batch.trimmed(value, index, key)
                begin = batch.response_at(len(part), index)
                found.append(Row(batch.samples[index], part, rank, micro, index, begin, kept))
        if any(row.sample is None for row in found):
            found = self._named_by_proof(found, key, step)
        self._held[key, step] = frozenset(row.sample for row in found)
        return found

    def _of_the_tokens(self, key: str) -> bool:
        """Whether a key's micro-batches are those that the tokens were recorded in."""
        return stage_of(key) == stages.LOG_PROB or (self.data / ONE_SCHEDULE).is_dir()

    def _of_all(self, key: str, step: int, at: BatchKey, values: list[Array]) -> bool:
        """Whether a micro-batch's values are one number, and no row of a sample's tokens."""
        return (
            key not in TOKENS
            and not self._saved(key, step)[at].parts
            and [value.size for value in values] == [1]
        )

    def misfit(self, key: str, step: int) -> str:
        """Why rows of a key belong to no sample; empty where it is no matter of their number.

        Raises:
            DumpError: a file is damaged.
        """
        batches = self.micro_batches(step) if self._of_the_tokens(key) else {}
        for (rank, micro), values in sorted(self.arrays(key, step).items()):
            batch = batches.get((rank, micro), MicroBatch())
            if self._of_all(key, step, (rank, micro), values):
                continue
            if batch.samples and len(batch.samples) != len(values):
                return (
                    f"{counted(len(values), 'row')} in a micro-batch of "
                    f"{counted(len(batch.samples), 'sample')}, rank {rank}, micro-batch {micro}"
                )
        return ""

    def unread(self, key: str, step: int) -> list[str]:
        """Files of a key of which none is an array as msprobe names it; empty where one is."""
        if self._saved(key, step):
            return []
        places = {self.data / name / f"step{step}" for name in (key, key.split(".", 1)[0])}
        return sorted(f.name for place in places for f in place.rglob("*") if f.is_file())

    def samples(self, key: str, step: int) -> frozenset[str | None]:
        """The samples that a key has rows of; None among them where a row's is not known.

        Raises:
            DumpError: a file is damaged.
        """
        if (key, step) not in self._held:
            self.rows(key, step)
        return self._held[key, step]

    def micro_steps(self, key: str, step: int) -> dict[int, int]:
        """By rank, in how many micro-batches a key was saved."""
        return dict(Counter(rank for rank, _ in self._saved(key, step)))

    def order(self, stage: str, step: int) -> dict[int, list[str]]:
        """By rank, the samples that a stage worked on, in the order of its batches."""
        found: dict[int, list[str]] = {}
        for entry in self.proof:
            if entry["step"] == step and entry["stage"] == stage:
                found.setdefault(entry["rank"], []).extend(entry["samples"])
        return found

    def _format(self, key: str, step: int, at: BatchKey) -> str:
        saved = self._saved(key, step)[at]
        if key in TOKENS:
            kept = _loaded(saved.files[0]).dtype if saved.files else np.dtype(np.int64)
            return kept.name if kept.kind == "f" else ""
        return "" if saved.parts else beside.format_of(beside.described(saved.directory, key))

    def contradicted(self, step: int) -> dict[str, str]:
        """Keys whose files say statistics that their values have not: which statistic, first of
        all micro-batches.

        Raises:
            DumpError: a file is damaged.
        """
        if step not in self._contradicted:
            self._contradicted[step] = dict(self._contradictions(step))
        return self._contradicted[step]

    def _contradictions(self, step: int) -> Iterator[tuple[str, str]]:
        for key in self._names:
            wrong = self.contradiction(key, step)
            if wrong is not None:
                yield key, wrong

    def contradiction(self, key: str, step: int) -> str | None:
        """The same of one key."""
        for saved in self._saved(key, step).values():
            said = {} if saved.parts else beside.described(saved.directory, key)
            wrong = beside.contradicted(said, _whole(saved.files[0], key)) if said else None
            if wrong is not None:
                return wrong
        return None

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
        samples = beside.described(directory, key).get("samples", [])
        if not isinstance(samples, list) or not all(isinstance(s, str) for s in samples):
            raise DumpError(f"{directory / key}.json: its samples are no list of digests")
        return samples


def _together(samples: Iterable[str]) -> str:
    """What several samples are called together, whatever their order: a digest of their digests."""
    return hashlib.sha256("\n".join(sorted(samples)).encode()).hexdigest()


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
        except _DAMAGED as error:
            raise DumpError(f"{path} is not key data of {key}: {error}") from error
    return found


def _whole(path: Path, key: str) -> Array:
    """The array of a file that is one micro-batch."""
    try:
        return _loaded(path)
    except _DAMAGED as error:
        raise DumpError(f"{path} is not key data of {key}: {error}") from error


def _loaded(path: Path) -> Array:
    array = npyfile.load(path, MAX_BYTES)
    if array.dtype.kind not in "iufb":
        raise ValueError(f"it holds {array.dtype}")
    return array


def _cut(array: Array, directory: Path, key: str) -> list[Array]:
    """Rows of different lengths by the offsets beside them, else along the first axis."""
    offsets = beside.described(directory, key).get("offsets")
    if offsets is None:
        return [np.atleast_1d(row) for row in np.atleast_1d(array)]
    bounds = np.asarray(offsets)
    if bounds.ndim != 1 or bounds.dtype.kind != "i" or (np.diff(bounds) < 0).any():
        raise ValueError("its offsets are not in order")
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > len(array)):
        raise ValueError("its offsets lie outside it")
    return [array[a:b] for a, b in itertools.pairwise(bounds)]
