"""The reward of the builtin prompts: dense and different between samples, so that advantages are
not all zero for an untrained model."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str | None, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Share of letters and digits in the answer, plus 1 where it holds the sum."""
    answer = solution_str or ""
    share = sum(character.isalnum() for character in answer) / max(len(answer), 1)
    return share + (1.0 if ground_truth in answer else 0.0)
