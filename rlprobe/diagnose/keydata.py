"""Key data of a run, row by row, joined by sample.

Files: ``dump/data/{name}/step{N}/rank{R}/micro_step{M}/{name}.npy`` with ``{name}.json`` beside
(``offsets`` where rows are ragged). A row is one sample's values; which sample, follows from the
prompts and responses of the same micro-batch, or, where a stage's key data has none (values,
advantages), from the order of samples in the mock proof. Nothing is joined by position alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rlprobe import stages
from rlprobe.errors import DumpError, ReplayError
from rlprobe.rollouts.digest import sample_digest
from rlprobe.store.read import Run

Array = npt.NDArray[Any]

#: Key data that a stage computes, and the stage.
OUTCOMES: dict[str, str] = {
    "ref_log_prob": stages.REFERENCE,
    "ref_log_probs": stages.REFERENCE,
    "old_log_probs": stages.LOG_PROB,
    "entropys": stages.LOG_PROB,
    "values": stages.VALUES,
}
#: Key data that stages are given.
REWARDS, ADVANTAGES = "token_level_rewards", "advantages"
TOKENS = ("input_ids", "prompts", "responses", "attention_mask", "position_ids")
#: Stage whose micro-batches a name belongs to.
_STAGE_OF = {**OUTCOMES, REWARDS: stages.ACTOR_UPDATE, ADVANTAGES: stages.ACTOR_UPDATE}
#: Arrays are read whole; one of a micro-batch has some megabytes.
_MAX_BYTES = 4 << 30
_STEP = re.compile(r"micro_step(\d{1,9})")
_RANK = re.compile(r"rank(\d{1,9})")


@dataclass(frozen=True)
class Row:
    """One sample's values of one name; ``sample`` is None where nothing says which it is."""

    sample: str | None
    values: Array
    rank: int
    micro_step: int
    #: Where the response's part begins; None where that is unknown.
    response_at: int | None = None


def names(run: Run) -> list[str]:
    """Names of the key data that a run has."""
    root = run.dump / "data"
    return sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def load(run: Run, name: str, step: int) -> list[Row]:
    """All rows of a name and step; empty where there are none.

    Raises:
        DumpError: a file is damaged.
    """
    rows: list[Row] = []
    own: dict[int, list[Row]] = {}
    for rank, micro, directory in _micro_steps(run.dump / "data" / name / f"step{step}"):
        values, masked = _rows(directory, name)
        ids = _samples(run, step, rank, micro, len(values)) if _has_tokens(name) else None
        masks = None if masked else _masks(run, step, rank, micro, values)
        lengths = _response_lengths(run, step, rank, micro, len(values)) if ids else None
        for index, row in enumerate(values):
            kept = row[masks[index]] if masks is not None else row
            begin = None if lengths is None else _response_at(len(kept), lengths[index])
            own.setdefault(rank, []).append(
                Row(ids[index] if ids is not None else None, kept, rank, micro, begin)
            )
    for rank, found in own.items():
        if any(row.sample is None for row in found):
            found = _by_proof(run, name, step, rank, found)
        rows.extend(found)
    return rows


def _response_at(length: int, response: int) -> int | None:
    """First entry of the response in a row over it, or over the whole sequence.

    Over a sequence, entry i is about token i + 1, so the response begins one early.
    """
    if length == response:
        return 0
    return length - response - 1 if length > response else None


def _has_tokens(name: str) -> bool:
    """Whether prompts and responses of the same micro-batches are recorded."""
    return _STAGE_OF.get(name, stages.LOG_PROB) == stages.LOG_PROB


def _micro_steps(root: Path) -> Iterator[tuple[int, int, Path]]:
    found = []
    for rank in root.iterdir() if root.is_dir() else []:
        match = _RANK.fullmatch(rank.name)
        for micro in rank.iterdir() if match else []:
            inner = _STEP.fullmatch(micro.name)
            if match and inner:
                found.append((int(match[1]), int(inner[1]), micro))
    yield from sorted(found)


def _rows(directory: Path, name: str) -> tuple[list[Array], bool]:
    """Rows of one file, and whether padding is out already."""
    path = directory / f"{name}.npy"
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DumpError(f"{path} is larger than {_MAX_BYTES} bytes; refused")
        array = np.load(path, allow_pickle=False)
        about = msgspec.json.decode((directory / f"{name}.json").read_bytes())["data"]
        offsets = about.get("offsets")
    except DumpError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise DumpError(f"{path} is not key data: {error}") from error
    if offsets is None:
        return [np.atleast_1d(row) for row in np.atleast_1d(array)], False
    if (
        not isinstance(offsets, list)
        or not all(isinstance(n, int) and 0 <= n <= len(array) for n in offsets)
        or sorted(offsets) != offsets
    ):
        raise DumpError(f"{path}: its offsets are no row boundaries of {len(array)} values")
    return [array[a:b] for a, b in itertools.pairwise(offsets)], True


def _beside(run: Run, name: str, step: int, rank: int, micro: int) -> list[Array] | None:
    directory = run.dump / "data" / name / f"step{step}" / f"rank{rank}" / f"micro_step{micro}"
    return _rows(directory, name)[0] if (directory / f"{name}.npy").is_file() else None


def _masks(run: Run, step: int, rank: int, micro: int, values: list[Array]) -> list[Array] | None:
    """Valid positions of padded rows; None where no mask fits them."""
    masks = _beside(run, "attention_mask", step, rank, micro)
    if masks is None or len(masks) != len(values):
        return None
    result = []
    for mask, row in zip(masks, values, strict=True):
        if row.ndim != 1 or mask.ndim != 1 or len(row) > len(mask):
            return None
        # A row over the whole sequence, or over the responses at its end.
        result.append(mask[len(mask) - len(row) :].astype(bool))
    return result


def _response_lengths(run: Run, step: int, rank: int, micro: int, count: int) -> list[int] | None:
    """Valid tokens of each response of a micro-batch."""
    responses = _beside(run, "responses", step, rank, micro)
    if responses is None or len(responses) != count:
        return None
    masks = _beside(run, "attention_mask", step, rank, micro)
    if masks is None or len(masks) != count:
        return [len(response) for response in responses]
    return [
        int(mask[len(mask) - len(response) :].astype(bool).sum())
        for mask, response in zip(masks, responses, strict=True)
    ]


def _samples(run: Run, step: int, rank: int, micro: int, count: int) -> list[str] | None:
    prompts = _beside(run, "prompts", step, rank, micro)
    responses = _beside(run, "responses", step, rank, micro)
    if prompts is None or responses is None or not len(prompts) == len(responses) == count:
        return None
    masks = _beside(run, "attention_mask", step, rank, micro)
    result = []
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if masks is not None and len(masks) == count:
            valid = masks[index].astype(bool)
            if len(valid) == len(prompt) + len(response):
                prompt = prompt[valid[: len(prompt)]]
                response = response[valid[len(valid) - len(response) :]]
        try:
            result.append(sample_digest(prompt, response))
        except ReplayError:
            return None
    return result


def _by_proof(run: Run, name: str, step: int, rank: int, rows: list[Row]) -> list[Row]:
    """Samples from the mock proof, in the order in which the stage's batch held them."""
    stage = _STAGE_OF.get(name)
    proof = [
        entry
        for entry in run.mock_proof() or []
        if entry["step"] == step and entry["rank"] == rank and entry["stage"] == stage
    ]
    samples = [sample for entry in proof for sample in entry["samples"]]
    if len(samples) != len(rows):
        return rows
    return [
        Row(sample, row.values, row.rank, row.micro_step, row.response_at)
        for sample, row in zip(samples, rows, strict=True)
    ]


@dataclass(frozen=True)
class Difference:
    """Key data of one name on both sides."""

    name: str
    step: int
    #: Relative L2 difference over all joined values; None where nothing could be joined.
    error: float | None
    max_abs: float
    mean_abs: float
    #: Rows joined, and rows of each side without a partner.
    joined: int
    benchmark_only: int
    target_only: int
    #: Sample with the largest difference, and the first token of its response that stands out.
    sample: str | None = None
    position: int | None = None
    #: Share of positions that differ at all.
    share: float = 0.0
    #: Position of the sequence from which on rows differ far more than before it.
    onset: int | None = None
    #: Share of the differing rows that equal another sample's row of the benchmark.
    moved: float = 0.0


def compare(benchmark: list[Row], target: list[Row], name: str, step: int) -> Difference:
    """Differences of one name, sample by sample.

    A sample that occurs several times is paired in order of occurrence. A row whose length
    differs on the other side counts as unpaired on both.
    """
    left, right = _grouped(benchmark), _grouped(target)
    pairs: list[tuple[str, Array, Array]] = []
    squares = norms = total = 0.0
    count = joined = differing = 0
    worst: tuple[float, str | None, int | None] = (0.0, None, None)
    largest = 0.0
    for key in left.keys() & right.keys():
        for one, other in zip(left[key], right[key], strict=False):
            b, t = one.values, other.values
            if b.shape != t.shape:
                continue
            joined += 1
            wide_b, wide_t = b.astype(np.float64), t.astype(np.float64)
            pairs.append((key, wide_b, wide_t))
            difference = np.abs(wide_t - wide_b)
            difference = np.where(wide_t == wide_b, 0.0, difference)  # equal infinities
            squares += float(np.sum(difference**2))
            norms += float(np.sum(wide_b**2))
            total += float(difference.sum())
            count += difference.size
            differing += int(np.count_nonzero(difference))
            size = float(difference.max(initial=0.0))
            if not size <= largest or (size > 0 and worst[1] is None):  # NaN counts as largest
                largest = max(largest, size) if np.isfinite(size) else float("inf")
                worst = (size, key, _onset(difference, one.response_at))
    error = None
    if joined:
        scale = np.sqrt(norms)
        error = float(np.sqrt(squares) / scale) if scale > 0 else (0.0 if squares == 0 else np.inf)
    return Difference(
        name=name,
        step=step,
        error=error,
        max_abs=largest,
        mean_abs=total / count if count else 0.0,
        joined=joined,
        benchmark_only=len(benchmark) - joined,
        target_only=len(target) - joined,
        sample=worst[1],
        position=worst[2],
        share=differing / count if count else 0.0,
        onset=_change_point([np.abs(t - b) for _, b, t in pairs if b.ndim == 1]),
        moved=_moved(pairs),
    )


#: A change point is one where differences grow by this factor at least.
_GROWTH = 6.0
#: More rows than this are not searched for one another.
_ROWS = 512


def _change_point(differences: list[Array]) -> int | None:
    """Where rows begin to differ, over all rows laid side by side; None where they always do.

    A causal model's fault that needs a history (a window, a cache, a late position) leaves the
    first tokens alone.
    """
    if not differences:
        return None
    longest = max(len(difference) for difference in differences)
    table = np.full((len(differences), longest), np.nan)
    for row, difference in enumerate(differences):
        table[row, : len(difference)] = np.where(np.isfinite(difference), difference, 0.0)
    squares = np.nanmean(table**2, axis=0)
    before = np.cumsum(squares)[:-1] / np.arange(1, longest)
    after = np.cumsum(squares[::-1])[::-1][1:] / np.arange(longest - 1, 0, -1)
    if longest < 6 or not after.max() > 0:
        return None
    places = np.arange(1, longest)
    inner = (places >= 2) & (places <= 0.9 * longest)
    growth = np.where(inner, after / np.maximum(before, 1e-30 + 1e-12 * after.max()), 0.0)
    best = int(np.argmax(growth))
    return int(places[best]) if growth[best] > _GROWTH**2 else None


def _moved(pairs: list[tuple[str, Array, Array]]) -> float:
    """Share of the rows that differ which equal another sample's row of the benchmark."""
    if not 1 < len(pairs) <= _ROWS:
        return 0.0
    found = wrong = 0
    for key, own, row in pairs:
        scale = np.linalg.norm(own)
        if not scale > 0 or np.linalg.norm(row - own) < 1e-2 * scale:
            continue
        wrong += 1
        found += any(
            other != key
            and candidate.shape == row.shape
            and np.linalg.norm(candidate - row) < 1e-4 * scale
            for other, candidate, _ in pairs
        )
    return found / wrong if wrong else 0.0


def _grouped(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.sample is not None:
            found.setdefault(row.sample, []).append(row)
    return found


def _onset(difference: Array, response_at: int | None) -> int | None:
    """First token of the response whose difference reaches a tenth of the response's largest."""
    if response_at is None:
        return None
    flat = difference.reshape(len(difference), -1).max(axis=1) if difference.size else difference
    flat = flat[response_at:]
    if not flat.size or not flat.max(initial=0.0) > 0:
        return None
    return int(np.argmax(flat >= 0.1 * flat.max()))
