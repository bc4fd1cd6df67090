"""Is a number that the trainer reports held against what it is made of, and only against that?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.diagnose.curves import Metrics
from rlprobe.judge import execution, given, keydata, metrics
from rlprobe.judge.analysis import Finding, Step
from rlprobe.judge.keydata import Row
from rlprobe.judge.stage import Process, Stage

SAMPLES, TOKENS = 6, 9


def _rows(values: np.ndarray) -> list[Row]:
    return [Row(f"s{n}", row.astype(np.float32), 0, 0, n, 0) for n, row in enumerate(values)]


def _losses(values: dict[str, tuple[float, float]], floor: float = 1e-6) -> Finding:
    rows = pl.DataFrame(
        [
            {"name": f"loss.{name}.{call}.debug", "phase": execution.LOSS, "judged": True,
             "floor": floor, "value_benchmark": str(b), "value_target": str(t),
             "mean_benchmark": None, "mean_target": None}
            for name, (b, t) in values.items() for call in (0, 1)
        ],
        schema_overrides={"mean_benchmark": pl.Float64, "mean_target": pl.Float64},
    )  # fmt: skip
    stage = Stage(stages.ACTOR_UPDATE, 0, [Process(0, rows, [])])
    return Finding(stage, [], [], [], None, None)


def _step(chance: np.random.Generator, apart: float) -> tuple[Step, dict[str, Any]]:
    """A step whose key data are ``apart``, and both sides' values by name."""
    step, sides = Step(0), {}
    for name in ("values", "given_values", "given_returns", "advantages", "old_log_probs",
                 "entropys", "token_level_rewards"):  # fmt: skip
        mine = chance.normal(size=(SAMPLES, TOKENS)).astype(np.float32)
        other = (mine + apart * chance.uniform(-1, 1, mine.shape)).astype(np.float32)
        step.key_data[name] = keydata.compare(_rows(mine), _rows(other), name, 0)
        sides[name] = mine, other
    return step, sides


def _judged(step: Step, sides: list[dict[str, float]]) -> dict[str, bool]:
    found = metrics.judge(step, *sides, gradients=1e-4, tokens=None, precisions=["fp32"])
    return {one.metric: one.differs for one in found}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("apart", [0.0, 1e-6, 1e-3])
def test_what_is_made_of_key_data_is_within_whatever_these_differ_by(
    seed: int, apart: float
) -> None:
    step, sides = _step(np.random.default_rng(seed), apart)
    made = [
        {f"critic/{metric}/{how.__name__}": float(how(sides[name][side]))
         for metric, name in (("values", "values"), ("advantages", "advantages"),
                              ("returns", "given_returns"))
         for how in (np.max, np.min, np.mean)}
        | {"critic/rewards/mean": float(sides["token_level_rewards"][side].sum(axis=1).mean()),
           "actor/entropy": float(sides["entropys"][side].mean()),
           "critic/vf_explained_var": float(
               1 - np.var(sides["given_returns"][side] - sides["given_values"][side])
               / np.var(sides["given_returns"][side]))}
        for side in (0, 1)
    ]  # fmt: skip
    found = _judged(step, made)
    assert found.keys() == made[0].keys()
    assert not any(found.values()), found
    for name in made[0]:  # by ten times as much as its parts differ, it is not made of them
        moved = made[1] | {name: made[1][name] + 10 * SAMPLES * TOKENS * max(apart, 1e-5)}
        assert _judged(step, [made[0], moved])[name], name


def test_a_loss_is_held_against_its_records_wherever_they_are_zero() -> None:
    step = Step(0)
    step.findings[stages.ACTOR_UPDATE] = _losses(
        {"actor_pg_loss": (0.5, 0.5 + 1e-7), "kl_loss": (0.0, 0.0)}
    )
    mine = {"actor/pg_loss": 0.5, "actor/kl_loss": 0.0}
    assert _judged(step, [mine, {"actor/pg_loss": 0.5 + 1e-7, "actor/kl_loss": 0.0}]) == {
        "actor/pg_loss": False, "actor/kl_loss": False,
    }  # fmt: skip
    assert all(_judged(step, [mine, {"actor/pg_loss": 0.502, "actor/kl_loss": 0.01}]).values())


def test_a_loss_that_was_not_judged_says_nothing_of_its_mean() -> None:
    step = Step(0)
    finding = _losses({"actor_pg_loss": (0.5, 0.5)})
    unjudged = pl.Series("judged", [True, False])
    stage = Stage(
        stages.ACTOR_UPDATE, 0, [Process(0, finding.stage.rows.with_columns(unjudged), [])]
    )
    step.findings[stages.ACTOR_UPDATE] = Finding(stage, [], [], [], None, None)
    assert _judged(step, [{"actor/pg_loss": 0.5}, {"actor/pg_loss": 9.0}]) == {}


def test_numbers_that_are_not_finite_on_one_side_differ_and_on_both_say_nothing() -> None:
    step, _ = _step(np.random.default_rng(0), 0.0)
    nan = {"actor/entropy": math.nan}
    assert _judged(step, [{"actor/entropy": 1.0}, nan]) == {"actor/entropy": True}
    assert _judged(step, [nan, {"actor/entropy": 1.0}]) == {"actor/entropy": True}
    assert _judged(step, [nan, nan]) == {}


@pytest.mark.parametrize("name", ["actor/lr", "critic/score/mean", "num_turns/max"])
def test_what_is_set_or_of_the_rollouts_is_the_same_number(name: str) -> None:
    assert _judged(Step(0), [{name: 1.0}, {name: 1.0 + 1e-9}]) == {name: False}
    assert _judged(Step(0), [{name: 1.0}, {name: 1.001}]) == {name: True}


def test_nothing_is_said_of_a_metric_whose_parts_are_unknown_or_lie_on_one_side() -> None:
    step, _ = _step(np.random.default_rng(0), 0.0)
    assert _judged(step, [{"my/own": 1.0}, {"my/own": 9.0}]) == {}
    rows = _rows(np.zeros((2, 3)))
    step.key_data["values"] = keydata.compare(rows, rows[:1], "values", 0)
    del step.key_data["given_values"]
    assert _judged(step, [{"critic/values/max": 1.0}, {"critic/values/max": 9.0}]) == {}
    assert Metrics().curves == []


def test_what_a_stage_was_given_is_held_against_its_source_and_not_without_one() -> None:
    chance = np.random.default_rng(1)
    mine = chance.normal(size=(SAMPLES, TOKENS))
    other = mine + 1e-6 * chance.normal(size=mine.shape)
    found = {
        "old_log_probs": keydata.compare(_rows(mine), _rows(other), "old_log_probs", 0),
        "given_old_log_probs": keydata.compare(
            _rows(mine), _rows(other), "given_old_log_probs", 0
        ),
        "given_actor_mask": keydata.compare(
            _rows(mine > 0), _rows(mine > 0), "given_actor_mask", 0
        ),
        "given_ref_log_prob": keydata.compare(
            _rows(mine), _rows(mine + 1), "given_ref_log_prob", 0
        ),
    }  # fmt: skip
    held = {o.name: o.excess > 1 for o in given.outcomes(found, stages.ACTOR_UPDATE)}
    assert held == {"given_old_log_probs": False, "given_actor_mask": False}
    found["given_old_log_probs"] = keydata.compare(
        _rows(mine), _rows(mine + 1e-3), "given_old_log_probs", 0
    )
    held = {o.name: o.excess > 1 for o in given.outcomes(found, stages.ACTOR_UPDATE)}
    assert held["given_old_log_probs"]


def test_zero_is_no_agreement_where_it_cannot_be() -> None:
    step, _ = _step(np.random.default_rng(0), 0.0)
    zero = {"actor/grad_norm": 0.0, "actor/entropy": 0.0, "actor/lr": 0.0}
    assert _judged(step, [zero, zero]) == {"actor/lr": False}
    assert _judged(step, [zero, zero | {"actor/grad_norm": 1.0}])["actor/grad_norm"]


def test_what_is_made_of_numbers_that_are_not_finite_has_no_bound_and_is_no_agreement() -> None:
    """A loss whose record is NaN on the target: one side alone is apart, two are not known."""
    step = Step(0)
    step.findings[stages.ACTOR_UPDATE] = _losses({"actor_pg_loss": (0.5, math.nan)})
    apart = [{"actor/pg_loss": 0.5}, {"actor/pg_loss": math.nan}]
    assert _judged(step, apart) == {"actor/pg_loss": True}
    found = metrics.judge(step, *apart, gradients=1e-4, tokens=None, precisions=["fp32"])
    assert [one.allowed for one in found] == [None]
    # the trainer leaves the NaN out of its mean: nobody knows what the rest may differ by
    assert _judged(step, [{"actor/pg_loss": 0.5}, {"actor/pg_loss": 9.0}]) == {}


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("values", "critic/values/mean"),
        ("old_log_probs", "rollout_corr/kl"),
        ("given_returns", "critic/vf_explained_var"),
        ("entropys", "actor/entropy"),
    ],
)
def test_what_is_not_finite_on_both_sides_is_known_by_what_is_made_of_it(
    name: str, metric: str
) -> None:
    """Such a metric is held against nothing: whoever reads "judged n of m" must learn its name."""
    chance = np.random.default_rng(7)
    step, _ = _step(chance, 0.0)
    assert metrics.not_finite(step) == {}
    odd = chance.normal(size=(SAMPLES, TOKENS)).astype(np.float32)
    odd[2, 3] = np.nan
    step.key_data[name] = keydata.compare(_rows(odd), _rows(odd), name, 0)
    found = metrics.not_finite(step)
    assert list(found) == [name] and any(known.search(metric) for known in found[name])
    assert not any(known.search("critic/lr") for known in found[name])


@pytest.mark.parametrize(
    ("values", "metric", "known"),
    [
        ((math.nan, math.nan), "actor/pg_loss", True),
        ((math.inf, math.nan), "actor/pg_loss", True),
        ((1.0, math.nan), "actor/pg_loss", False),  # one side alone is a divergence
        ((1.0, 1.0), "actor/pg_loss", False),
        ((math.nan, math.nan), "actor/kl_loss", False),
    ],
)
def test_a_loss_that_is_not_finite_on_both_sides_is_named_with_its_metric(
    values: tuple[float, float], metric: str, known: bool
) -> None:
    step = Step(0, {stages.ACTOR_UPDATE: _losses({"actor_pg_loss": values})})
    found = metrics.not_finite(step)
    assert any(made.search(metric) for own in found.values() for made in own) == known
