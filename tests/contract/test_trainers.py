"""Every trainer and algorithm on real verl with the collector's file, everything switched on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlprobe import stages
from rlprobe.dumps.key_data import KeyData
from rlprobe.rollouts import hdf5
from tests.contract.conftest import RUN
from tests.contract.runs import Runs, Tree
from tests.e2e.expected import EVERYTHING
from tests.e2e.server import Variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.msprobe, pytest.mark.contract]

ONE_STEP = "trainer.total_training_steps=1"
GRPO = "algorithm.adv_estimator=grpo"
SIX = set(stages.STAGES) - {stages.FORCED, stages.TEACHER}
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.lora.merge=true",  # for the CPU rollout
)
FOUR = SIX - {stages.VALUES, stages.CRITIC_UPDATE}


def trainer(name: str) -> pytest.MarkDecorator:
    return pytest.mark.cell("trainer", name, RUN)


def heads(variant: Variant, stage: str, step: int = 0, rank: int = 0) -> int:
    """Forward calls of the language model's head in a stage."""
    names = Tree(variant.dump).records(stage, step=step, rank=rank)
    return sum(name.startswith("Module.lm_head.Linear.forward") for name in names)


@trainer("V0, PPO with a critic")
def test_ppo(made: Runs) -> None:
    variant = made.collector(
        "everything", **EVERYTHING, token_range_end=1, step_start=1, step_end=1
    )
    assert Tree(variant.dump).stages().keys() == SIX
    assert heads(variant, stages.LOG_PROB, step=1) == 4


@trainer("V0, GRPO")
def test_grpo(made: Runs) -> None:
    variant = made.collector("grpo", ONE_STEP, GRPO, **EVERYTHING)
    tree = Tree(variant.dump)
    assert tree.stages().keys() == FOUR
    assert not (variant.dump / "data/values").exists()
    assert len(tree.key("ref_log_prob")) == 4


@trainer("V0, GRPO with LoRA and FSDP (two log-prob calls)")
def test_lora(made: Runs) -> None:
    """The call with the adapter is the actor's, the one without the reference's."""
    variant = made.collector("lora", GRPO, *LORA, step_end=1, **EVERYTHING)
    tree = Tree(variant.dump)
    assert tree.stages() == {stage: {"step0", "step1"} for stage in FOUR}, "no doubled steps"
    for step in (0, 1):
        assert heads(variant, stages.LOG_PROB, step) == heads(variant, stages.REFERENCE, step) == 4
    lines = [
        json.loads(line)
        for path in (variant.dump / "parts/captured").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    adapters = {(line["stage"], line["step"]): line["adapter"] for line in lines}
    assert adapters[stages.LOG_PROB, 1] is True
    assert adapters[stages.REFERENCE, 1] is False
    # an adapter begins as nothing: after its first update the two calls differ
    for step, same in ((0, True), (1, False)):
        old, reference = (tree.key(k, step=step) for k in ("old_log_probs", "ref_log_prob"))
        assert all(map(np.allclose, old, reference)) is same
    switched = made.collector(
        "lora-reference", GRPO, *LORA, ONE_STEP, msprobe=True, reference_dump=True
    )
    assert Tree(switched.dump).stages().keys() == {stages.REFERENCE}


@trainer("V0, world size 2")
def test_two_ranks(made: Runs) -> None:
    variant = made.collector("two-ranks", ONE_STEP, "trainer.n_gpus_per_node=2", **EVERYTHING)
    tree = Tree(variant.dump)
    for stage in SIX - {stages.GENERATE}:
        for rank in (0, 1):
            assert tree.records(stage, rank=rank)
    rows = [
        row.tobytes()
        for rank in (0, 1)
        for part in tree.key("responses", rank=rank)
        for row in part
    ]
    assert sorted(rows) == sorted(of_recording(variant.dump)), "each sample on one rank"
    assert heads(variant, stages.LOG_PROB, rank=1) == 2


def of_recording(tree: Path) -> list[bytes]:
    found = hdf5.read(tree / "rollouts/step0.h5").tensors["responses"]
    assert isinstance(found, np.ndarray)
    return [row.tobytes() for row in found]


@trainer("V0, gradient accumulation")
def test_gradient_accumulation(made: Runs) -> None:
    """Mini-batches of two prompts with two answers each, in micro-batches of one sample."""
    variant = made.collector(
        "accumulation",
        ONE_STEP,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_mini_batch_size=2",
        **EVERYTHING,
    )
    tree = Tree(variant.dump)
    assert heads(variant, stages.ACTOR_UPDATE) == 8
    assert len(tree.key("advantages")) == 8
    assert len(tree.key("actor_grad_norm")) == 2, "two optimizer steps"
    debug = tree.records(stages.ACTOR_UPDATE, name="debug")
    assert {name.split(".")[-2] for name in debug if ".grad_reduced." in name} == {"0", "1"}
    assert sum(name.startswith("loss.loss.") for name in debug) == 8


@trainer("V0, dynamic batch size")
def test_dynamic_batch_size(made: Runs) -> None:
    sections = ("actor.ppo", "rollout.log_prob", "ref.log_prob")
    chosen = [f"actor_rollout_ref.{name.split('.')[0]}." for name in sections]
    overrides = [
        f"{chosen[0]}use_dynamic_bsz=true",
        f"{chosen[1]}log_prob_use_dynamic_bsz=true",
        f"{chosen[2]}log_prob_use_dynamic_bsz=true",
        f"{chosen[0]}ppo_max_token_len_per_gpu=128",
        f"{chosen[1]}log_prob_max_token_len_per_gpu=128",
        f"{chosen[2]}log_prob_max_token_len_per_gpu=128",
        "critic.use_dynamic_bsz=true",
        "critic.ppo_max_token_len_per_gpu=128",
        "critic.forward_max_token_len_per_gpu=128",
    ]
    variant = made.collector("dynamic", ONE_STEP, *overrides, **EVERYTHING)
    tree = Tree(variant.dump)
    assert tree.stages().keys() == SIX
    parts = tree.key("responses")
    assert sum(len(part) for part in parts) == 8
    assert heads(variant, stages.LOG_PROB) == len(parts)


@pytest.fixture(scope="module")
def v1(made: Runs) -> Variant:
    """The newer trainer under Ray: PPO with a critic, two steps."""
    return made.ray("v1-ppo", "trainer.use_v1=true", step_end=1, **EVERYTHING)


@trainer("V1 (TransferQueue), PPO with a critic")
def test_v1(v1: Variant) -> None:
    dump = v1.scratch / "dump"
    tree = Tree(dump)
    assert tree.stages() == {stage: {"step0", "step1"} for stage in SIX}
    for step in (0, 1):
        assert heads(v1, stages.LOG_PROB, step) == heads(v1, stages.REFERENCE, step) > 0
    for name in ("responses", "old_log_probs", "ref_log_prob", "values", "advantages"):
        assert tree.key(name)


def key_data(tree: Path) -> KeyData:
    """A tree's key data, with the samples of each stage."""
    parts = sorted((tree / "parts/samples").glob("*.jsonl"))
    lines = (line for part in parts for line in part.read_text().splitlines())
    return KeyData(tree / "data", [json.loads(line) for line in lines])


@pytest.mark.cell("trainer", "V1, token_level_rewards by sample", RUN)
def test_v1_rewards(v1: Variant) -> None:
    dump = v1.scratch / "dump"
    found = hdf5.read(dump / "rollouts/step0.h5")
    rewards = {sample.sample_digest: sample.reward for sample in found.samples}
    assert len(set(rewards.values())) > 1, "rewards that differ tell samples apart"
    rows = key_data(dump).rows("token_level_rewards", 0)
    assert {row.sample: float(row.values.sum()) for row in rows} == pytest.approx(rewards)


@pytest.mark.cell("trainer", "V1, rollouts recorded, joined by prompt and sample", RUN)
def test_v1_rollouts(v1: Variant) -> None:
    """Rows trained on are those recorded, whatever order the trainer had them in."""
    dump = v1.scratch / "dump"
    for step in (0, 1):
        found = hdf5.read(dump / f"rollouts/step{step}.h5")
        assert len(found) == 8
        assert len({sample.prompt_identity for sample in found.samples}) == 4
        recorded = {sample.sample_digest: sample for sample in found.samples}
        for name in ("old_log_probs", "entropys", "values"):
            rows = key_data(dump).rows(name, step)
            assert {row.sample for row in rows} == recorded.keys(), name
            assert len(rows) == 8


@pytest.fixture(scope="module")
def v1_grpo(made: Runs) -> Variant:
    return made.ray("v1-grpo", "trainer.use_v1=true", ONE_STEP, GRPO, **EVERYTHING)


@trainer("V1 (TransferQueue), GRPO")
def test_v1_grpo(v1_grpo: Variant) -> None:
    assert Tree(v1_grpo.scratch / "dump").stages().keys() == FOUR


def replayed_on_v1(made: Runs, name: str, recorded: Path, *overrides: str) -> Variant:
    """A mock run of the newer trainer, with no engine that could generate."""
    return made.ray(
        name,
        "trainer.use_v1=true",
        "actor_rollout_ref.rollout.name=rlprobe_replay",
        *overrides,
        msprobe=True,
        key_data_dump=True,
        step_end=1,
        enable_mock_inference=True,
        mock_data_path=str(recorded),
    )


def samples(tree: Path, name: str, step: int) -> dict[str, list[float]]:
    """A step's key data by sample."""
    rows = key_data(tree).rows(name, step)
    assert len({row.sample for row in rows} - {None}) == 8, name
    return {str(row.sample): np.asarray(row.values).tolist() for row in rows}


@pytest.mark.cell("trainer", "V1, mock inference from a V1 run: PPO, bit for bit", RUN)
def test_v1_replays_v1(made: Runs, v1: Variant) -> None:
    dump = v1.scratch / "dump"
    variant = replayed_on_v1(made, "v1-mock", dump)
    for step in (0, 1):
        found = hdf5.read(dump / f"rollouts/step{step}.h5")
        recorded = {sample.sample_digest for sample in found.samples}
        trained = samples(variant.scratch / "dump", "old_log_probs", step)
        assert trained.keys() == recorded
    # the order of rows within the update is drawn anew, so that weights differ from then on
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values"):
        ours = samples(variant.scratch / "dump", name, 0)
        assert ours == samples(dump, name, 0), name
    assert not (variant.scratch / "dump/rollouts").exists()


@pytest.mark.cell("trainer", "V1, mock inference from a V0 run", RUN)
def test_v1_replays_v0(made: Runs) -> None:
    recorded = made.collector("grpo", ONE_STEP, GRPO, **EVERYTHING).dump
    variant = replayed_on_v1(made, "v1-mock-v0", recorded, ONE_STEP, GRPO)
    ours, theirs = (
        {name: samples(tree, name, 0) for name in ("rollout_log_probs", "advantages")}
        for tree in (variant.scratch / "dump", recorded)
    )
    assert ours["rollout_log_probs"] == theirs["rollout_log_probs"]
    assert ours["advantages"].keys() == theirs["advantages"].keys()
    for sample, values in ours["advantages"].items():
        assert values == pytest.approx(theirs["advantages"][sample], rel=1e-5, abs=1e-6)


@pytest.mark.cell("trainer", "recipe: a script and a worker subclass of the user's own", RUN)
def test_recipe(made: Runs) -> None:
    script = Path(__file__).with_name("recipe.py")
    variant = made.ray("recipe", ONE_STEP, script=script, **EVERYTHING)
    assert "Training Progress" in variant.log
    assert Tree(variant.scratch / "dump").stages().keys() == SIX
    assert heads(variant, stages.LOG_PROB) == 4
