"""Rewards and masks that a stage was given are looked at under each framework's name for them."""

from __future__ import annotations

import pytest

from rlprobe import stages
from rlprobe.diagnose.gate import batch
from rlprobe.judge import given
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


def test_returns_are_held_against_what_they_are_made_from() -> None:
    """slime's update is given them as it is given advantages."""

    def wrong(error: float, source: float) -> list[str]:
        both = [difference("returns", error), difference("old_log_probs", source)]
        found = given.wrong({one.name: one for one in both}, stages.ACTOR_UPDATE)
        return [one.difference.name for one in found]

    assert wrong(0.01, 1e-6) == ["returns"]
    assert wrong(0.01, 1e-3) == wrong(0.0, 0.0) == []
