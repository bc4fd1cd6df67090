"""Real verl, varied: what is captured, what is refused, and does watching change anything?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions, ReplayOptions
from rlprobe.rollouts import hdf5
from rlprobe.spec import RunSpec
from tests.e2e.conftest import Aligned
from tests.e2e.server import Server, Variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Nothing is recorded, but the run is seeded and replayed as any other.
UNWATCHED = CaptureOptions(stages=(), key_data=False, configurations=False, provenance=False)


def _weights(variant: Variant, step: int) -> dict[str, Any]:
    """Every tensor that verl saved of actor, critic and optimizers, by file and name."""
    torch = pytest.importorskip("torch")
    found: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            found[prefix] = local.detach().clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(f"{prefix}/{key}", item)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                collect(f"{prefix}/{index}", item)

    root = variant.scratch / "checkpoints" / f"global_step_{step}"
    for path in sorted(root.rglob("*.pt")):
        if path.name.startswith(("model", "optim")):
            # written a moment ago by this test's own run
            collect(str(path.relative_to(root)), torch.load(path, weights_only=False))
    return found


def test_the_light_engine_leaves_metrics_and_weights_bitwise_as_they_were(
    verl: Server, runs: dict[str, RunSpec]
) -> None:
    torch = pytest.importorskip("torch")
    repeat = runs["repeat"]
    watched = verl.run("watched", repeat, "trainer.save_freq=2")
    plain = verl.run("plain", repeat, "trainer.save_freq=2", capture=UNWATCHED, expected_stages=())
    assert (watched.status, plain.status) == (0, 0), watched.log[-3000:] + plain.log[-3000:]
    assert not (plain.dump / stages.ACTOR_UPDATE).exists()
    assert (watched.dump / stages.ACTOR_UPDATE).exists()
    assert watched.metrics() == plain.metrics()
    ours, theirs = _weights(watched, 2), _weights(plain, 2)
    assert len(ours) > 100
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_grpo_is_captured_without_a_critic(verl: Server, runs: dict[str, RunSpec]) -> None:
    expected = (stages.GENERATE, stages.REFERENCE, stages.LOG_PROB, stages.ACTOR_UPDATE)
    capture = CaptureOptions(stages=expected, step_end=1, token_range=(0, 0))
    variant = verl.run(
        "grpo",
        runs["benchmark"],
        "algorithm.adv_estimator=grpo",
        capture=capture,
        expected_stages=expected,
    )
    assert variant.status == 0, variant.log[-3000:]
    found = {path.parents[1].parent.name for path in variant.dump.rglob("dump.json")}
    assert found == set(expected)


def test_a_stage_that_did_not_run_fails_and_is_named(
    verl: Server, runs: dict[str, RunSpec]
) -> None:
    variant = verl.run("warmup", runs["repeat"], "trainer.critic_warmup=10")
    assert variant.status != 0
    assert "actor_update (step 0, 1)" in variant.error


def test_other_prompts_are_refused_with_their_rows(verl: Server, runs: dict[str, RunSpec]) -> None:
    variant = verl.run("prompts", runs["repeat"], "data.shuffle=true", "data.seed=7")
    assert variant.status != 0
    assert "the prompts of this step are not those" in variant.error
    assert "rows differ (rows" in variant.error


def test_another_batch_size_is_refused(verl: Server, runs: dict[str, RunSpec]) -> None:
    variant = verl.run(
        "batch",
        runs["repeat"],
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "critic.ppo_mini_batch_size=2",
    )
    assert variant.status != 0
    assert "holds 8 samples, but this step asks for 4" in variant.error


def test_damaged_rollouts_are_refused(
    verl: Server, runs: dict[str, RunSpec], aligned: Aligned, tmp_path: Path
) -> None:
    recorded = aligned.run("benchmark") / "rollouts"
    for path in recorded.iterdir():
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 0xFF
        (tmp_path / path.name).write_bytes(damaged)
    variant = verl.run(
        "damaged", runs["repeat"], replay=ReplayOptions(path=str(tmp_path), step_end=None)
    )
    assert variant.status != 0
    assert "the file is damaged" in variant.error


def test_recomputed_rewards_are_the_recorded_ones_here(
    verl: Server, runs: dict[str, RunSpec], aligned: Aligned
) -> None:
    variant = verl.run("rewards", runs["repeat"], "reward.num_workers=1", recompute_rewards=True)
    assert variant.status == 0, variant.log[-3000:]
    # verl balances the batch, so rows of micro batches are not those of the recording
    files = (variant.dump / "data/token_level_rewards/step0").rglob("*.npy")
    rewards = np.concatenate([np.load(path).sum(axis=1) for path in files])
    samples = hdf5.read(aligned.run("benchmark") / "rollouts/step0.h5").samples
    assert np.allclose(np.sort(rewards), np.sort([sample.reward for sample in samples]))


def test_uncaptured_steps_are_still_replayed(verl: Server, runs: dict[str, RunSpec]) -> None:
    repeat = runs["repeat"]
    training = tuple(s for s in stages.TRAINING_STAGES if s != stages.TEACHER)
    variant = verl.run(
        "late", repeat, capture=CaptureOptions(stages=training, step_start=1, step_end=1)
    )
    assert variant.status == 0, variant.log[-3000:]
    steps = {path.parents[1].name for path in variant.dump.rglob("dump.json")}
    assert steps == {"step1"}
    proof = [
        json.loads(line)
        for path in (variant.side / "parts/samples").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {row["step"] for row in proof} == {1}
