"""Is one training judged alike in whatever layouts the two sides are?

One pair is held against each other here, with a fault of one shard; ``make layouts`` (or ``-m
long``) makes the table of docs/layouts.md.
"""

from __future__ import annotations

import importlib.util

import pytest

from rlprobe.selftest.forkservers import ForkServers
from tests.e2e import layouts

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mbridge") is None,
        reason="mbridge of requirements/lock.txt is not installed",
    ),
]
CASES = {case.name: case for case in layouts.cases()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, servers: ForkServers) -> layouts.Layouts:
    return layouts.Layouts(tmp_path_factory.mktemp("layouts"), servers)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, servers: ForkServers) -> layouts.Layouts:
    return layouts.Layouts(tmp_path_factory.mktemp("experts"), servers, experts=True)


def test_fsdp_and_a_tensor_parallel_megatron_are_aligned(made: layouts.Layouts) -> None:
    found = made.judge("fsdp2", "megatron-tp2")
    assert found.verdict == "aligned", found.sentence
    judged = {stage.stage: stage.records for stage in found.stages}
    # of 51 parameters gradients before and after clipping, changes and weights, and 190 records of
    # what modules take and give in both directions
    assert judged["actor_update"] >= 4 * 51 + 190 and judged["actor_compute_log_prob"] >= 51 + 101


def test_a_fault_of_one_shard_is_located_with_its_rank_and_features(made: layouts.Layouts) -> None:
    found = made.judge("fsdp2", "megatron-tp2", "one_shard")
    assert layouts.is_found(CASES["one_shard"], found, "fsdp2:megatron-tp2"), found.sentence
    assert found.first is not None and found.first.rank == 1
    assert found.cause is not None
    assert "which rank 1 has" in found.cause.evidence[-1], found.cause.evidence


@pytest.mark.long
@pytest.mark.parametrize("pair", layouts.PAIRS_OF_EXPERTS)
def test_experts_in_every_layout(experts: layouts.Layouts, pair: str) -> None:
    said = layouts.looked_at(experts, pair, layouts.cases(experts=True))
    assert not layouts.shortfalls({pair: said})


@pytest.mark.long
@pytest.mark.parametrize("pair", layouts.PAIRS)
def test_every_layout_against_the_first_and_back(made: layouts.Layouts, pair: str) -> None:
    said = layouts.looked_at(made, pair, CASES.values())
    assert not layouts.shortfalls({pair: said})
