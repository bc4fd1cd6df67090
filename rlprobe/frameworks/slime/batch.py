"""Reading slime's ``rollout_data``: who the samples are, and key data by micro-batch.

``rollout_data`` is one rank's share of a rollout: a mapping of per-sample lists. slime adds to it
while a step runs (``ref_log_probs``, ``log_probs``, ``values``, ``advantages``, ``returns``), so
that at the end it holds what its ``--save-debug-train-data`` would write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rlprobe.rollouts.digest import sample_digest

#: Per-sample lists that are key data: slime's name and ours (the vendor's where it has one).
ACTOR_KEYS: dict[str, str] = {
    "loss_masks": "loss_mask",
    "log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "entropy": "entropys",
    "rewards": "rewards",
    "advantages": "advantages",
    "returns": "returns",
    "kl": "kl",
}
CRITIC_KEYS: dict[str, str] = {"values": "values"}


def samples(rollout_data: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Token ids of each sample's prompt and response."""
    pairs = []
    lengths = rollout_data["response_lengths"]
    for tokens, length in zip(rollout_data["tokens"], lengths, strict=True):
        ids = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
        cut = len(ids) - int(length)
        pairs.append((ids[:cut], ids[cut:]))
    return pairs


def digests(rollout_data: Mapping[str, Any]) -> list[str]:
    """One digest per sample over the tokens that are trained on."""
    return [sample_digest(prompt, response) for prompt, response in samples(rollout_data)]


def micro_batches(iterator: Any) -> list[list[int]]:
    """Samples of each micro-batch, as positions in ``rollout_data``'s lists.

    slime's iterator has either a schedule (``micro_batch_indices``) or, up to v0.2.x, a fixed
    ``micro_batch_size``.
    """
    schedule = getattr(iterator, "micro_batch_indices", None)
    if schedule is not None:
        return [[int(index) for index in batch] for batch in schedule]
    count = len(iterator.rollout_data["response_lengths"])
    size = int(iterator.micro_batch_size)
    return [list(range(start, min(start + size, count))) for start in range(0, count, size)]


def key_data(
    rollout_data: Mapping[str, Any], names: Mapping[str, str], rows: Sequence[int]
) -> Iterator[tuple[str, list[Any]]]:
    """The key data of one micro-batch: name and one row per sample."""
    count = len(rollout_data["response_lengths"])
    for name, ours in names.items():
        column = rollout_data.get(name)
        if column is None or len(column) != count:
            continue
        yield ours, [_row(column[row]) for row in rows]


def tokens(rollout_data: Mapping[str, Any], rows: Sequence[int]) -> Iterator[tuple[str, list[Any]]]:
    """``input_ids``, ``prompts`` and ``responses`` of one micro-batch."""
    pairs = samples(rollout_data)
    chosen = [pairs[row] for row in rows]
    yield "input_ids", [_ids(prompt + response) for prompt, response in chosen]
    yield "prompts", [_ids(prompt) for prompt, _ in chosen]
    yield "responses", [_ids(response) for _, response in chosen]


def _ids(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _row(value: Any) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    return tensor.detach().reshape(-1)
