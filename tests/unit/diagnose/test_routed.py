"""Tokens that two sides sent to other experts, joined by token."""

from __future__ import annotations

import types
from typing import Any

import polars as pl
import pytest

from rlprobe import stages
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.diagnose.gate import contradictions, routers
from rlprobe.dumps import routing
from rlprobe.judge.routed import lacking, routed, with_idle
from rlprobe.roles import BENCHMARK, TARGET

GATE, LATER = "model.layers.2.mlp.gate", "model.layers.10.mlp.gate"
Choices = dict[int, list[int]]


class Run:
    def __init__(self, **tables: list[tuple[int, str, Choices]]) -> None:
        self._tables = tables
        self.manifest = types.SimpleNamespace(declared={})

    def routing(self, stage: str) -> pl.DataFrame | None:
        rows = self._tables.get(stage)
        if rows is None:
            return None
        table = [
            {"step": 0, "rank": rank, "module": module, "experts": 8, "token": token,
             "chosen": chosen}
            for rank, module, choices in rows
            for token, chosen in choices.items()
        ]  # fmt: skip
        return pl.DataFrame(table, schema=routing.SCHEMA)


class Sides:
    def __init__(self, benchmark: Run | None, target: Run | None) -> None:
        self._runs = {BENCHMARK: benchmark, TARGET: target}

    def run(self, role: str) -> Run | None:
        return self._runs[role]


def of(benchmark: Run | None, target: Run | None) -> list[Any]:
    return routed(Sides(benchmark, target), 0)  # type: ignore[arg-type]


WHOLE: Choices = {1: [0, 3], 2: [1, 2], 3: [4, 7], 2**63 + 9: [0, 1]}


def test_tokens_are_joined_whatever_rank_and_order_they_were_in() -> None:
    # two data-parallel ranks, in another order; one token's experts are others
    halves = [
        (1, GATE, {2**63 + 9: [0, 1], 2: [1, 5]}),
        (0, GATE, {3: [4, 7], 1: [0, 3]}),
    ]
    found = of(Run(actor_update=[(0, GATE, WHOLE)]), Run(actor_update=halves))
    assert [(r.stage, r.against, r.module) for r in found] == [("actor_update", BENCHMARK, GATE)]
    assert (found[0].tokens, found[0].otherwise, found[0].share) == (4, 1, 0.25)
    assert (found[0].choices, found[0].moved, found[0].experts) == (8, 1, 8)


def test_layers_stand_by_their_numbers_and_replicas_count_once() -> None:
    both = [(rank, module, WHOLE) for rank in (0, 1) for module in (LATER, GATE)]
    found = of(Run(actor_update=both), Run(actor_update=both[:2]))
    assert [(r.module, r.tokens, r.otherwise) for r in found] == [(GATE, 4, 0), (LATER, 4, 0)]


def test_a_token_that_one_side_has_alone_is_not_counted() -> None:
    found = of(Run(actor_update=[(0, GATE, WHOLE)]), Run(actor_update=[(0, GATE, {1: [0, 3]})]))
    assert [(r.tokens, r.otherwise) for r in found] == [(1, 0)]


def test_a_dropped_token_is_routed_otherwise() -> None:
    dropped = WHOLE | {1: [3, -1]}
    found = of(Run(actor_update=[(0, GATE, WHOLE)]), Run(actor_update=[(0, GATE, dropped)]))
    assert found[0].otherwise == 1


def test_training_is_held_against_the_engine_that_it_generates_with() -> None:
    engine, trained = {**WHOLE, 3: [5, 6]}, WHOLE
    sides = [
        Run(**{stages.FORCED: [(0, GATE, engine)], stages.LOG_PROB: [(0, GATE, trained)]}),
        Run(**{stages.FORCED: [(0, GATE, trained)], stages.LOG_PROB: [(0, GATE, trained)]}),
    ]
    found = {(r.stage, r.against): r.otherwise for r in of(*sides)}
    assert found == {
        (stages.LOG_PROB, "benchmark"): 0,
        (stages.FORCED, "benchmark"): 1,
        (stages.LOG_PROB, "engine_benchmark"): 1,
        (stages.LOG_PROB, "engine_target"): 0,
    }


def test_an_expert_that_no_token_was_sent_to_is_idle() -> None:
    every = {token: [2 * token, 2 * token + 1] for token in range(4)}
    sides = Sides(Run(actor_update=[(0, GATE, every)]), Run(actor_update=[(0, GATE, every)]))
    assert with_idle(sides, "actor_update", 0) == []  # type: ignore[arg-type]
    assert with_idle(sides, "critic_update", 0) == []  # type: ignore[arg-type]
    # seven of eight experts on the target
    fewer = every | {3: [5, 6]}
    sides = Sides(Run(actor_update=[(0, GATE, every)]), Run(actor_update=[(1, GATE, fewer)]))
    assert with_idle(sides, "actor_update", 0) == [GATE]  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [None, Run()])
def test_without_routers_there_is_nothing(target: Run | None) -> None:
    assert of(Run(actor_update=[(0, GATE, WHOLE)]), target) == []


def gated(benchmark: Choices, target: Choices, declared: dict[str, Any]) -> GateItem | None:
    runs = [Run(actor_update=[(0, GATE, own), (0, LATER, WHOLE)]) for own in (benchmark, target)]
    runs[1].manifest.declared = declared
    evidence: Any = types.SimpleNamespace(
        results=Sides(*runs), target=runs[1], step=types.SimpleNamespace(number=0)
    )
    return routers.check(evidence)


def test_routing_that_was_replayed_is_said_beside_the_verdict() -> None:
    replay = {"routing": "replay"}
    assert gated(WHOLE, WHOLE, {}) is None
    same = gated(WHOLE, WHOLE, replay)
    assert same is not None
    assert same.state == "open"
    assert "8 choices of 2 routers" in str(same.evidence)
    moved = gated(WHOLE, WHOLE | {1: [2, 3], 2: [4, 5]}, replay)
    assert moved is not None
    assert moved.state == "caveat"
    assert f"otherwise for 2 of 8; the most in actor_update, {GATE}: 50 %" in str(moved.evidence)


def test_choices_that_no_side_recorded_are_unknown_where_routing_was_replayed() -> None:
    runs = [Run(), Run()]
    runs[1].manifest.declared = {"routing": "replay"}
    evidence: Any = types.SimpleNamespace(
        results=Sides(*runs), target=runs[1], step=types.SimpleNamespace(number=0)
    )
    item = routers.check(evidence)
    assert item is not None
    assert item.state == "caveat"
    assert "is not recorded" in str(item.evidence)


FEWER: Choices = {token: chosen for token, chosen in WHOLE.items() if token != 2}
OTHER: Choices = WHOLE | {2: [1, 5]}


@pytest.mark.parametrize(
    ("target", "lost"),
    [
        ({GATE: WHOLE, LATER: WHOLE}, {}),
        ({GATE: WHOLE, LATER: FEWER}, {LATER: 1}),
        ({GATE: {**WHOLE, 5: [0, 1]}, LATER: WHOLE}, {GATE: 1}),
        # a token that no router has
        ({GATE: FEWER, LATER: FEWER}, {GATE: 1, LATER: 1}),
    ],
)
def test_choices_that_one_side_lacks_are_counted(
    target: dict[str, Choices], lost: dict[str, int]
) -> None:
    whole = Run(actor_update=[(0, GATE, WHOLE), (0, LATER, WHOLE)])
    other = Run(actor_update=[(0, module, choices) for module, choices in target.items()])
    assert lacking(Sides(whole, other), "actor_update", 0) == lost  # type: ignore[arg-type]


def test_an_engine_may_have_cached_what_none_of_its_routers_is_given_again() -> None:
    whole = Run(forced_generation=[(0, GATE, WHOLE), (0, LATER, WHOLE)])
    for later, lost in ((FEWER, {}), (WHOLE, {GATE: 1})):
        other = Run(forced_generation=[(0, GATE, FEWER), (0, LATER, later)])
        found = lacking(Sides(whole, other), "forced_generation", 0)  # type: ignore[arg-type]
        assert found == lost


@pytest.mark.parametrize(
    ("choices", "ties", "misplaced", "replay", "said"),
    [
        (WHOLE, 0, None, False, False),
        (OTHER, 0, None, False, True),
        # a near tie shows in what the experts compute, and is counted there
        (OTHER, 1, None, False, False),
        (OTHER, 0, "other samples", False, False),
        (OTHER, 0, None, True, False),
    ],
)
def test_choices_that_contradict_what_experts_compute_are_said(
    choices: Choices, ties: int, misplaced: str | None, replay: bool, said: bool
) -> None:
    sides = Sides(Run(actor_update=[(0, GATE, WHOLE)]), Run(actor_update=[(0, GATE, choices)]))
    declared = {"routing": "replay"} if replay else {}
    stage = types.SimpleNamespace(
        misplaced=misplaced, laid_out=None, processes=[types.SimpleNamespace(near_ties=ties)]
    )
    finding = types.SimpleNamespace(stage=stage, origin=None)
    evidence: Any = types.SimpleNamespace(
        results=sides,
        step=types.SimpleNamespace(number=0, findings={"actor_update": finding}),
        target=types.SimpleNamespace(manifest=types.SimpleNamespace(declared=declared)),
    )
    assert bool(contradictions._choices(evidence)) == said
