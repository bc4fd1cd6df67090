"""Key data of some samples, batched as trainers do, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from rlprobe import stages
from rlprobe.compare.samples.run import Compared, Samples
from rlprobe.dumps.results import KEY_DATA
from rlprobe.rollouts.digest import sample_digest

#: Prompt and response tokens of four samples.
SAMPLES = [
    ([1, 2, 3], [10, 11]),
    ([4], [12, 13, 14]),
    ([5, 6], [15]),
    ([7, 8, 9, 1], [16, 17, 18]),
]
DIGESTS = [sample_digest(*sample) for sample in SAMPLES]


def log_probs(sample: int) -> np.ndarray[Any, Any]:
    """One number for each response token."""
    return -np.arange(1.0, len(SAMPLES[sample][1]) + 1) - 10 * sample


def save(data: Path, key: str, place: tuple[int, int], array: Any, **about: Any) -> None:
    rank, micro = place
    directory = data / key / "step0" / f"rank{rank}" / f"micro_step{micro}"
    directory.mkdir(parents=True)
    np.save(directory / f"{key}.npy", np.asarray(array))
    (directory / f"{key}.json").write_text(json.dumps({"data": about}))


def padded(
    data: Path, place: tuple[int, int], samples: Sequence[int], error: float = 0.0, pad: int = 6
) -> None:
    """A batch as older trainers have it: prompts padded left, responses right."""
    prompts, responses, masks, values = [], [], [], []
    for sample in samples:
        prompt, response = SAMPLES[sample]
        left, right = pad - len(prompt), pad - len(response)
        prompts.append([0] * left + prompt)
        responses.append(response + [0] * right)
        masks.append([0] * left + [1] * (len(prompt) + len(response)) + [0] * right)
        # padding holds whatever the device left there
        values.append([*(log_probs(sample) + error), *np.random.default_rng(pad).random(right)])
    save(data, "prompts", place, prompts)
    save(data, "responses", place, responses)
    save(data, "attention_mask", place, masks)
    save(data, "old_log_probs", place, values)


def ragged(data: Path, place: tuple[int, int], samples: Sequence[int], error: float = 0.0) -> None:
    """A batch as newer trainers have it: rows end to end."""
    for key, rows in (
        ("prompts", [SAMPLES[s][0] for s in samples]),
        ("responses", [SAMPLES[s][1] for s in samples]),
        ("input_ids", [SAMPLES[s][0] + SAMPLES[s][1] for s in samples]),
        ("old_log_probs", [log_probs(s) + error for s in samples]),
    ):
        ends = np.cumsum([len(row) for row in rows]).tolist()
        save(data, key, place, np.concatenate(rows), offsets=[0, *ends])


def both(tmp: Path, stage: str = stages.LOG_PROB) -> Compared:
    found = Samples(tmp / "b", tmp / "t").compare(stage)
    assert found is not None
    return found


def compared(tmp: Path, stage: str = stages.LOG_PROB) -> dict[str, Any]:
    return both(tmp, stage).summary


def joined(tmp: Path, stage: str = stages.LOG_PROB) -> pl.DataFrame:
    return both(tmp, stage).tables[KEY_DATA]
