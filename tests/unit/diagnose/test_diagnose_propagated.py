"""What an update inherits from the data it was given: a bound on losses and on their gradient."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.compare.samples.pairing import Key
from rlprobe.judge import propagated
from rlprobe.judge.keydata import Array, Row

SAMPLES, TOKENS, PER_MICRO = 8, 24, 2
Side = dict[str, Array]
LOSSES = ("loss", "actor_pg_loss", "actor_ppo_kl", "kl_loss", "kl_coef", "actor_pg_clipfrac")
WEIGHT, CLIP = 0.1, 0.2


def benchmark(seed: int) -> Side:
    draw = np.random.default_rng(seed)
    shape = (SAMPLES, TOKENS)
    new = -draw.gamma(2.0, 1.0, shape)
    old = new + 0.1 * draw.standard_normal(shape)
    values = draw.standard_normal(shape)
    rewards = np.where(draw.random(SAMPLES) < 0.5, 1.0, 0.0)
    raw = rewards[:, None] - values
    return {
        "update_log_probs": new,
        "old_log_probs": old,
        "given_old_log_probs": old,
        "ref_log_prob": new + 0.1 * draw.standard_normal(shape),
        "values": values,
        "given_values": values,
        "given_returns": np.broadcast_to(rewards[:, None], shape).copy(),
        "advantages": (raw - raw.mean()) / raw.std(),
    } | {"given_ref_log_prob": np.zeros(shape)}


def with_noise(side: Side, names: tuple[str, ...], size: float, seed: int) -> Side:
    """Another device's scoring: sources move, and what is made of them with them."""
    draw = np.random.default_rng(1000 + seed)
    other = dict(side)
    for name in names:
        other[name] = side[name] + size * draw.standard_normal(side[name].shape)
    return derived(other)


def derived(side: Side) -> Side:
    raw = side["given_returns"] - side["values"]
    return side | {
        "given_old_log_probs": side["old_log_probs"],
        "given_ref_log_prob": side["ref_log_prob"],
        "given_values": side["values"],
        "advantages": (raw - raw.mean()) / raw.std(),
    }


def losses(side: Side, rows: slice) -> dict[str, float]:
    """PPO's clipped loss with a k3 penalty, of one micro-batch."""
    log_ratio = (side["update_log_probs"] - side["given_old_log_probs"])[rows]
    ratio, a = np.exp(log_ratio), side["advantages"][rows]
    policy = np.maximum(-a * ratio, -a * np.clip(ratio, 1 - CLIP, 1 + CLIP))
    apart = (side["given_ref_log_prob"] - side["update_log_probs"])[rows]
    kl = np.exp(apart) - apart - 1
    clipped = -a * np.clip(ratio, 1 - CLIP, 1 + CLIP) > -a * ratio
    return {
        "loss": float(np.mean(policy) + WEIGHT * np.mean(kl)),
        "actor_pg_loss": float(np.mean(policy)),
        "actor_ppo_kl": float(np.mean(-log_ratio)),
        "kl_loss": float(np.mean(kl)),
        "kl_coef": WEIGHT,
        "actor_pg_clipfrac": float(np.mean(clipped)),
    }


def keyed(left: Side, right: Side) -> dict[str, list[dict[Key, Row]]]:
    def rows(values: Array) -> dict[Key, Row]:
        return {
            (f"s{i}", 0): Row(f"s{i}", values[i], 0, i // PER_MICRO, i % PER_MICRO, 0)
            for i in range(SAMPLES)
        }

    return {name: [rows(left[name]), rows(right[name])] for name in left}


def allowed(left: Side, right: Side) -> tuple[dict[tuple[str, int], float], dict[int, float]]:
    micros = range(SAMPLES // PER_MICRO)
    table = pl.DataFrame(
        [(0, f"loss.{n}.{m}.debug", m, str(WEIGHT) if n == "kl_coef" else None)
         for m in micros for n in LOSSES],
        schema=["rank", "name", "call", "value_benchmark"], orient="row",
    )  # fmt: skip
    found = propagated.of(keyed(left, right), stages.ACTOR_UPDATE, table)
    if found is None:
        return {}, {}
    by_name = {}
    for _, name, bound in found.losses.iter_rows():
        _, part, micro, _ = name.split(".")
        by_name[part, int(micro)] = bound
    return by_name, {micro: error for (_, micro), error in found.gradients.items()}


@pytest.mark.parametrize("names", [("old_log_probs",), ("ref_log_prob",), ("values",),
                                   ("old_log_probs", "ref_log_prob", "values")])  # fmt: skip
@pytest.mark.parametrize("size", [1e-6, 1e-2])
def test_no_loss_moves_by_more_than_the_bound(names: tuple[str, ...], size: float) -> None:
    nearest = 0.0
    for seed in range(20):
        left = derived(benchmark(seed))
        right = with_noise(left, names, size, seed)
        bounds, _ = allowed(left, right)
        for micro in range(SAMPLES // PER_MICRO):
            rows = slice(micro * PER_MICRO, (micro + 1) * PER_MICRO)
            one, other = losses(left, rows), losses(right, rows)
            for name in LOSSES:
                moved, bound = abs(other[name] - one[name]), bounds[name, micro]
                assert moved <= bound + 1e-15, (name, seed)
                if name == "loss":
                    nearest = max(nearest, moved / bound)
    assert nearest > 0.02  # and it is no bound that allows anything; k3 is flat near 0


def test_the_gradient_moves_as_what_it_is_made_of() -> None:
    left = derived(benchmark(3))
    right = with_noise(left, ("values",), 1e-2, 3)
    _, gradients = allowed(left, right)
    for micro, found in gradients.items():
        rows = slice(micro * PER_MICRO, (micro + 1) * PER_MICRO)
        ratio = np.exp((left["update_log_probs"] - left["given_old_log_probs"])[rows])
        was, now = ratio * left["advantages"][rows], ratio * right["advantages"][rows]
        exact = np.linalg.norm(now - was) / np.linalg.norm(was)
        assert exact == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("name", ["given_old_log_probs", "given_ref_log_prob", "advantages"])
def test_what_no_source_explains_is_no_excuse(name: str) -> None:
    left = derived(benchmark(4))
    right = dict(left)
    right[name] = left[name] + 1e-3
    assert allowed(left, right) == ({}, {})


def test_the_updates_own_difference_is_no_excuse() -> None:
    left = derived(benchmark(5))
    right = dict(left)
    right["update_log_probs"] = left["update_log_probs"] + 1e-2
    assert allowed(left, right) == ({}, {})


def test_each_loss_is_widened_by_its_own_data_only() -> None:
    left = derived(benchmark(6))
    bounds, _ = allowed(left, with_noise(left, ("ref_log_prob",), 1e-2, 6))
    assert bounds["kl_loss", 0] > 1e-3 and bounds["loss", 0] > 1e-4
    for name in ("actor_pg_loss", "actor_ppo_kl", "kl_coef", "actor_pg_clipfrac"):
        assert bounds[name, 0] == 0


def test_returns_move_the_value_loss() -> None:
    left = derived(benchmark(7)) | {"update_values": benchmark(7)["values"]}
    right = with_noise(left, ("values",), 1e-3, 7)
    right["given_returns"] = left["given_returns"] + (right["values"] - left["values"])
    table = pl.DataFrame(
        [(0, "loss.critic_vf_loss.0.debug", 0, None)],
        schema=["rank", "name", "call", "value_benchmark"],
        orient="row",
    )
    found = propagated.of(keyed(left, right), stages.CRITIC_UPDATE, table)
    assert found is not None
    rows = slice(0, PER_MICRO)
    one, other = (
        float(np.mean((left["update_values"][rows] - side["given_returns"][rows]) ** 2) / 2)
        for side in (left, right)
    )
    assert 0 < abs(other - one) <= found.losses.item(0, "inherited") < 0.02
