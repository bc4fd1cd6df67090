"""Do recorded answers find their prompts, whatever the order, and only theirs?"""

from __future__ import annotations

import numpy as np
import pytest

from rlprobe.errors import ReplayError
from rlprobe.rollouts import Ragged, Rollouts, Sample, matching


def recorded(prompts: str, outputs: list[int] | None = None) -> Rollouts:
    """One row a letter, which is its prompt."""
    samples = [
        Sample.build(f"s{row}", prompt, [1], [2 + row]) for row, prompt in enumerate(prompts)
    ]
    found = Rollouts(step=0, trainer_step=1, samples=samples)
    found.tensors["responses"] = Ragged.from_rows([np.array([1])] * len(prompts))
    if outputs is not None:
        found.values[matching.OUTPUT] = outputs
    found.check()
    return found


def match(of: Rollouts, asked: str, repeats: list[int]) -> list[list[list[int]]]:
    keys = [sample.prompt_identity for sample in of.samples]
    return matching.match(of, keys, list(asked), repeats, "FILE")


def test_prompts_in_another_order_get_their_own_answers() -> None:
    assert match(recorded("aabb"), "ba", [2, 2]) == [[[2], [3]], [[0], [1]]]


def test_a_prompt_drawn_twice_shares_its_answers_out() -> None:
    assert match(recorded("aaaa"), "aa", [2, 2]) == [[[0], [1]], [[2], [3]]]


def test_outputs_of_a_session_stay_together() -> None:
    found = match(recorded("aaab", [0, 1, 0, 0]), "ba", [1, 2])
    assert found == [[[3]], [[0, 1], [2]]]


def test_another_batch_size_is_refused() -> None:
    with pytest.raises(ReplayError, match="FILE holds 4 samples, but this step asks for 2"):
        match(recorded("aabb"), "a", [2])


def test_prompts_that_were_not_recorded_are_named() -> None:
    with pytest.raises(ReplayError, match=r"1 of 2 rows differ \(rows 1\)"):
        match(recorded("aabb"), "ac", [2, 2])


def test_a_prompt_asked_more_often_than_recorded_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"1 of 2 rows differ \(rows 0\)"):
        match(recorded("abbb"), "ab", [2, 2])
