"""Rewards and masks that a stage was given are looked at under each framework's name for them."""

from __future__ import annotations

import pytest

from rlprobe.diagnose.gate import batch
from rlprobe.judge.keydata import Difference
from tests.unit.diagnose.stand_ins import evidence, run


def difference(name: str, error: float = 0.0) -> Difference:
    return Difference(name, 0, error, error, error, 4, 0, 0, sample="s", share=0.25)


def states(*found: Difference) -> dict[str, str]:
    ours = run(declared={})
    ours.key = "benchmark"
    items, _ = batch.check(evidence(None, ours, ours, key_data={one.name: one for one in found}))
    return {item.item: item.state for item in items}


@pytest.mark.parametrize("name", ["token_level_rewards", "rewards"])
def test_rewards_that_differ_shut_the_gate(name: str) -> None:
    assert states(difference(name))["rewards"] == "open"
    assert states(difference(name, 0.1))["rewards"] == "shut"


def test_rewards_of_tokens_say_more_than_those_of_samples() -> None:
    both = difference("token_level_rewards", 0.1), difference("rewards")
    assert states(*both)["rewards"] == "shut"


@pytest.mark.parametrize("name", ["loss_mask", "attention_mask", "responses"])
def test_masks_and_tokens_that_differ_are_a_caveat(name: str) -> None:
    assert states(difference("rewards"), difference(name))["batch inputs"] == "open"
    assert states(difference("rewards"), difference(name, 0.5))["batch inputs"] == "caveat"
