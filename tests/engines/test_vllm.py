"""A real vLLM under real verl, on this CPU: do the engine and training agree, and is a fault of the
engine alone found where it is?
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import yaml

from rlprobe import frameworks, stages
from rlprobe.capture.session import CaptureOptions
from rlprobe.cli import main
from rlprobe.compare.match import rules
from rlprobe.compare.traininfer import sketched
from rlprobe.config import load
from rlprobe.dumps.key_data import KeyData
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.verl.host import assets
from rlprobe.judge import engine, engine_weights
from rlprobe.roles import BENCHMARK
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec
from rlprobe.store import parts
from rlprobe.store.commit import commit
from rlprobe.store.keys import run_key
from tests.e2e.server import Server, Variant

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.msprobe,
]
CAPTURE = CaptureOptions(
    engine="msprobe",
    task="tensor",
    stages=(stages.GENERATE, stages.LOG_PROB),
    token_range=(0, 1),
    step_end=1,
)
#: The light engine with tensors, and what every token was sent to.
SKETCHED = dataclasses.replace(
    CAPTURE, engine="light", task="statistics", tensors=True, token_sketch=True
)
#: Four experts, two of them a token's, and a shared one.
MOE = {"qwen2-moe": "tiny-qwen2-moe-wide-heads"}
#: Two ranks train, and are two workers of one engine.
TP = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)
#: Adapters, which the engine has apart from the weights, or merged into them.
LORA = (
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.model.target_modules=all-linear",
)
MERGED = "actor_rollout_ref.model.lora.merge=true"
Run = Callable[..., Variant]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def spec(work: Path) -> RunSpec:
    raw = yaml.safe_load((ROOT / "config/examples/verl_vllm_cpu.yaml").read_text())
    raw |= {"store": str(work / "store"), "results": str(work / "results")}
    path = work / "vllm.yaml"
    path.write_text(yaml.safe_dump(raw))
    made = plan(load(path), {})[BENCHMARK]
    framework, places = frameworks.get("verl"), RunDirectories(work, work / "store/assets")
    for words in framework.prepare(made, places):
        subprocess.run([sys.executable, *words[1:]], check=True)
    modules = framework.environment(made, places)["VERL_USE_EXTERNAL_MODULES"]
    return dataclasses.replace(
        made,
        environment={
            **made.environment,
            "VERL_USE_EXTERNAL_MODULES": f"{modules},engine_faults",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/engines")]),
        },
    )


@pytest.fixture(scope="module")
def run(spec: RunSpec, work: Path, python: str) -> Iterator[Run]:
    server = Server(work / "store", spec, work / "variants", python)

    def one(
        name: str, *overrides: str, fault: str = "", model: str = "",
        capture: CaptureOptions = CAPTURE, fails: bool = False, collector: Path | None = None,
        **environment: str,
    ) -> Variant:  # fmt: skip
        if model:
            made = assets.make(f"builtin:{MOE[model]}", work / "store/assets")
            overrides = (*overrides, f"actor_rollout_ref.model.path={made}")
        variant = server.run(
            name, spec, *overrides, capture=capture, expected_stages=(), config=collector,
            environment={"ENGINE_FAULT": fault, **environment},
        )  # fmt: skip
        assert (variant.status != 0) == fails, variant.log[-3000:]
        return variant

    yield one
    server.close()


@pytest.fixture(scope="module")
def half(run: Run) -> Variant:
    """The first step is a clean one; an update does not reach one layer before the second."""
    return run("half", fault="half")


def synced(variant: Variant) -> list[engine_weights.Sync]:
    """How the engine's weights stood to the trainer's, by digests and sketches."""
    table = parts.weights(variant.side)
    assert table is not None
    return list(engine_weights.steps(table))


def routing(variant: Variant, spec: RunSpec, work: Path) -> dict[str, int]:
    """How many tokens the engine sent to other experts than training."""
    declared = {**spec.declared(), "tags": variant.scratch.name}
    manifest = commit(variant.scratch, work / "store", run_key(declared), declared)
    found = sketched.compare(manifest.parent, rules.load())
    assert found is not None and found.notes == []
    return sketched.otherwise(found.choices)


def results(variant: Variant) -> Path:
    return variant.scratch.with_name(f"{variant.scratch.name}-out")


def compared(variant: Variant) -> pl.DataFrame:
    out = results(variant)
    assert main(["compare", "--train-infer", str(variant.scratch), "-o", str(out)]) == 0
    return pl.read_parquet(out / "train_infer/records.parquet")


@pytest.mark.parametrize(
    ("fault", "steps"), [("half", [0]), pytest.param("", [0, 1], marks=pytest.mark.long)]
)
def test_vllm_and_training_agree_in_every_record(
    run: Run, half: Variant, fault: str, steps: list[int]
) -> None:
    variant = half if fault else run("clean")
    table = compared(variant).filter(pl.col("step").is_in(steps))
    for step in steps:
        prefill, decode = engine.parts(table.filter(step=step))
        assert prefill.first is None and decode.first is None, (str(prefill), str(decode))
        assert prefill.passes == decode.passes == 8
        assert prefill.records == decode.records == 8 * 39
        found = synced(variant)[step]
        assert found.kind is None and found.left == () and found.compared == 27
    weights = table.filter(slot="parameters")
    # vLLM never calls its head: the logits' processor takes its weight
    assert set(weights.filter(status="target_only")["module"]) == {"lm_head"}
    weights = weights.filter(pl.col("status") != "target_only")
    assert set(weights["status"]) == {"matched"}
    assert weights["error"].max() == 0, "verl sends what it trained, bit by bit"
    padded = weights.filter(pl.col("module").str.ends_with("embed_tokens"))
    assert padded["reason"].str.contains("261 rows are compared").all()
    # nothing is left over but what is said to be
    alone = table.filter(pl.col("status") == "benchmark_only", pl.col("reason").is_null())
    said = ("rotary_emb", "attn", "logits_processor", "self_attn")
    assert {module.rpartition(".")[2] for module in alone["module"]} <= set(said)


@pytest.mark.long
def test_with_a_critic_they_agree_as_well(run: Run, work: Path) -> None:
    """PPO: a critic is updated between generation and the weights that the engine takes next."""
    critic = assets.make("builtin:tiny-qwen2-wide-heads-critic", work / "store/assets")
    variant = run(
        "ppo", "algorithm.adv_estimator=gae", f"critic.model.path={critic}",
        "critic.optim.lr=1e-3", "critic.ppo_micro_batch_size_per_gpu=2",
    )  # fmt: skip
    table = compared(variant)
    for step in (0, 1):
        prefill, decode = engine.parts(table.filter(step=step))
        assert prefill.first is None and decode.first is None, (str(prefill), str(decode))
        assert prefill.passes == decode.passes == 8
        assert prefill.records == decode.records == 8 * 39
        found = synced(variant)[step]
        assert found.kind is None and found.left == () and found.compared == 27, found
    assert all(step["critic/vf_loss"] > 0 for step in variant.metrics()), "a critic was trained"


@pytest.mark.long
def test_other_angles_in_the_engine_are_found_in_attention(run: Run) -> None:
    prefill, decode = engine.parts(compared(run("rope", fault="rope")).filter(step=0))
    for part in (prefill, decode):
        assert part.first is not None
        assert part.first[1] == "model.layers.0.self_attn.o_proj" and ".input.0" in part.first[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "module"),
    [("epsilon", "post_attention_layernorm"), ("scale", "self_attn.o_proj")],
)
def test_what_one_layer_was_told_otherwise_is_found_at_it(
    run: Run, fault: str, module: str
) -> None:
    for part in engine.parts(compared(run(fault, fault=fault)).filter(step=0)):
        assert part.first is not None and part.beyond == part.passes, str(part)
        assert part.first[1] == f"model.layers.1.{module}", str(part)


@pytest.mark.long
def test_a_cache_off_by_one_is_found_in_decoding_only(run: Run) -> None:
    prefill, decode = engine.parts(compared(run("cache", fault="cache")).filter(step=0))
    assert prefill.first is None and decode.first is not None
    assert decode.first[1] == "model.layers.1.self_attn.o_proj"
    assert decode.beyond == decode.passes


def test_a_layer_that_an_update_did_not_reach_is_named(half: Variant) -> None:
    table = compared(half)
    weights = table.filter(slot="parameters")
    assert weights.filter(step=0)["error"].max() == 0
    wrong = weights.filter(pl.col("step") == 1, pl.col("error") > 0)
    assert wrong.height and all(".layers.1." in module for module in wrong["module"])
    prefill, _ = engine.parts(table.filter(step=1))
    assert prefill.first is not None and ".layers.1" in prefill.first[1]
    first, second = synced(half)
    assert first.kind is None and second.kind == engine_weights.HALF
    assert all(".layers.1." in one.name for one in second.wrong)
    assert 0 < len(second.wrong) < (second.moved or 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("stale", [None, engine_weights.STALE]),
        ("split", [engine_weights.SPLIT] * 2),
        ("rounded", [engine_weights.ROUNDED] * 2),
        ("kept", [engine_weights.OTHER] * 2),
    ],
)
def test_what_is_the_matter_with_an_engines_weights_is_named(
    run: Run, fault: str, kinds: list[str | None]
) -> None:
    found = synced(run(fault, fault=fault))
    assert [step.kind for step in found] == kinds
    if fault != "stale":
        assert all(".layers.1." in one.name for step in found for one in step.wrong)


@pytest.mark.long
@pytest.mark.parametrize("model", sorted(MOE))
def test_a_mixture_of_experts_agrees_and_routes_alike(
    run: Run, spec: RunSpec, work: Path, model: str
) -> None:
    variant = run(f"{model}-clean", model=model, capture=SKETCHED)
    for part in engine.parts(compared(variant)):
        assert part.first is None, str(part)
        assert part.passes == 16 and part.records > 16 * 30
    for step in synced(variant):
        assert step.kind is None and step.left == (), step
    routed = routing(variant, spec, work)
    assert routed["routers"] == 2 and routed["tokens"] > 100 and routed["otherwise"] == 0


@pytest.mark.long
@pytest.mark.parametrize("model", sorted(MOE))
def test_experts_that_were_dealt_out_wrongly_are_found_at_their_layer(run: Run, model: str) -> None:
    variant = run(f"{model}-experts", model=model, capture=SKETCHED, fault="experts")
    for part in engine.parts(compared(variant)):
        assert part.first is not None and part.first[1].startswith("model.layers.1.mlp"), str(part)
    for step in synced(variant):
        assert step.kind == engine_weights.SPLIT, step
        assert {one.name for one in step.wrong} == {
            f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
        }


@pytest.mark.long
def test_two_tensor_parallel_workers_agree_with_two_ranks(run: Run) -> None:
    variant = run("tp2", *TP)
    table = compared(variant)
    assert set(table["rank"]) == {0, 1}
    for step in (0, 1):
        prefill, decode = engine.parts(table.filter(step=step))
        assert prefill.first is None and decode.first is None, (str(prefill), str(decode))
        # both workers' records of every forward
        assert prefill.passes == decode.passes == 16
        found = synced(variant)[step]
        assert found.kind is None and found.left == () and found.compared == 27, found
    weights = table.filter(slot="parameters", status="matched")
    assert weights.height and weights["error"].max() == 0


@pytest.mark.long
def test_workers_that_took_each_others_heads_are_found(run: Run) -> None:
    variant = run("tp2-split", *TP, fault="split")
    for step in synced(variant):
        assert step.kind == engine_weights.SPLIT, step
        assert [one.name for one in step.wrong] == ["model.layers.1.self_attn.q_proj.weight"]
    for part in engine.parts(compared(variant)):
        assert part.first is not None, str(part)
        assert part.first[1].startswith("model.layers.1.self_attn"), str(part)


@pytest.mark.long
def test_a_budget_that_an_engines_dumps_have_spent_ends_the_run_cleanly(
    run: Run, half: Variant
) -> None:
    """Layers of eight requests take more than a MiB; of the trainer nothing is dumped."""
    options = dataclasses.replace(CAPTURE, stages=(stages.GENERATE,), budget_mib=1)
    variant = run("budget", capture=options, fails=True)
    # vLLM hands on that its engine is dead; `rlprobe run` shows rlprobe's own message
    said = [line for line in variant.log.splitlines() if "rlprobe.errors.RunError: " in line]
    assert "the capture budget of 1 MiB is spent" in said[-1]
    assert "before step 1, actor_generate_sequences" in said[-1]
    found = variant.dump / stages.GENERATE
    assert [path.name for path in found.iterdir()] == ["step0"]
    place = Path(stages.GENERATE, "step0/rank0/dump.json")
    ours, theirs = (json.loads((side.dump / place).read_text()) for side in (variant, half))
    assert ours["data"].keys() == theirs["data"].keys()
    assert not list(variant.dump.rglob("*.partial"))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", "rope"])
def test_prompts_alone_are_one_forward_of_engine_and_trainer(
    run: Run, tmp_path: Path, fault: str
) -> None:
    dump, out, asked = tmp_path / "dump", tmp_path / "out", tmp_path / "collector.yaml"
    options = {
        "msprobe": True, "key_data_dump": True, "actor_train_dump": True, "task": "tensor",
        "dump_path": str(dump),
    }  # fmt: skip
    asked.write_text(yaml.safe_dump({"precision_collector": options}))
    run(
        f"prompts-only-{fault}", "trainer.total_training_steps=1", fault=fault, collector=asked,
        PROMPTS_ONLY="1",
    )  # fmt: skip
    data = KeyData(dump / "data")
    generated, trained = (data.rows(key, 0) for key in ("rollout_log_probs", "old_log_probs"))
    assert len(generated) == 8
    apart = [
        np.abs(one.values - other.values[: len(one.values)]).max()
        for one, other in zip(generated, trained, strict=True)
    ]
    assert main(["compare", "--train-infer", str(dump), "-o", str(out)]) == 0
    (prefill,) = engine.parts(pl.read_parquet(out / "train_infer/records.parquet"))
    assert prefill.phase == engine.PREFILL and prefill.records > 100
    if fault:
        assert min(apart) > 1e-3
        assert prefill.first is not None
        assert prefill.first[1] == "model.layers.0.self_attn.o_proj"
    else:
        assert max(apart) < 1e-4 and prefill.first is None, (apart, str(prefill))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["", "adapter"])
def test_adapters_are_the_trainers_unless_an_update_did_not_reach_them(
    run: Run, fault: str
) -> None:
    variant = run(f"lora-{fault}", *LORA, fault=fault)
    first, second = synced(variant)
    # of two layers, seven projections each: A and B
    assert first.kind is None and first.left == () and first.compared == 27 + 2 * 7 * 2, first
    parts = [engine.parts(compared(variant).filter(step=step)) for step in (0, 1)]
    assert all(part.first is None for part in parts[0]), str(parts[0])
    if not fault:
        assert second.kind is None and second.compared == first.compared, second
        assert all(part.first is None for part in parts[1]), str(parts[1])
        return
    assert second.kind == engine_weights.HALF, second
    assert {".layers.1." in one.name and ".lora_" in one.name for one in second.wrong} == {True}
    for part in parts[1]:
        assert part.first is not None and ".layers.1" in part.first[1], str(part)


@pytest.mark.long
def test_weights_that_verl_rounds_when_it_merges_adapters_are_named(run: Run) -> None:
    """verl 0.9.1 sends merged weights in bf16, in an fp32 run too."""
    for step in synced(run("lora-merged", *LORA, MERGED)):
        assert step.kind == engine_weights.ROUNDED, step
        assert {one.rounded for one in step.wrong} == {"bfloat16"}
        # whatever has an adapter may have it merged
        assert {"q_proj" in name or "k_proj" in name for name in step.left} & {True}
