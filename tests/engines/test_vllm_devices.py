"""The same responses through a real vLLM on two "devices" (other kernels): `generation: compare`.

Is a fault of the target's engine alone found at its layer, in prefill or in decoding, and nothing
where there is none?
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe import frameworks, stages
from rlprobe.compare import sides
from rlprobe.compare.compare import Options, compare
from rlprobe.config import load
from rlprobe.diagnose import diagnosis
from rlprobe.diagnose.diagnosis import Diagnosis
from rlprobe.diagnose.run import diagnose
from rlprobe.errors import RunError
from rlprobe.files import replace_text
from rlprobe.frameworks import RunDirectories
from rlprobe.judge import forced, inputs
from rlprobe.judge.inputs import PlannedPair, PlannedRun
from rlprobe.refine import decide, refined, substitution, suspects
from rlprobe.roles import BENCHMARK, TARGET
from rlprobe.runs.jobs import Jobs
from rlprobe.runs.launch import launch
from rlprobe.runs.plan import pairs, plan
from rlprobe.runs.suspects import refining, substituted
from rlprobe.selftest.forkservers import ForkServers
from rlprobe.store.read import Run

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, TOKENS = 4, 5

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
Judge = Callable[..., Diagnosis]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory, python: str) -> Iterator[Judge]:
    work = tmp_path_factory.mktemp("vllm-devices")
    # every run has an environment of its own, and a server of that
    servers = ForkServers(work / "logs", python)

    def one(fault: str, *, again: bool = False) -> Diagnosis:
        jobs = _jobs(work, fault)
        for role in (BENCHMARK, TARGET):
            launch(jobs.runs[role], work / "store", start=servers)
        results = Path(jobs.results)
        left, right = (
            sides.resolve(str(work / "store/runs" / jobs.runs[role].key), None)
            for role in (BENCHMARK, TARGET)
        )
        out = results / "compare" / TARGET
        compare(left, right, out, Options(pair=TARGET, stages=jobs.stages(TARGET)))
        inputs.write(
            results / inputs.NAME, name=fault or "clean", store=str(work / "store"),
            runs={
                role: PlannedRun(spec.key, "cpu", "fp32", list(spec.stages))
                for role, spec in jobs.runs.items()
            },
            pairs={TARGET: PlannedPair(BENCHMARK, TARGET, list(jobs.stages(TARGET)))},
            framework="verl", framework_version="0.9.1",
        )  # fmt: skip
        found = diagnose(results)
        return _refined(found, jobs, work / "store", servers) if again else found

    yield one
    servers.close()


def _jobs(work: Path, fault: str) -> Jobs:
    raw: dict[str, Any] = yaml.safe_load((ROOT / "config/examples/verl_vllm_cpu.yaml").read_text())
    raw |= {
        "name": fault or "clean",
        "store": str(work / "store"),
        "results": str(work / "results"),
        "generation": "compare",
        "steps": {"total": 1, "start": 0, "end": 0},
        "controls": {"repeat": False},
        "capture": {"forced_samples": SAMPLES, "forced_tokens": TOKENS, "token_range": None},
        "overrides": [*raw["overrides"], "actor_rollout_ref.rollout.temperature=0.7"],
    }
    path = work / f"{raw['name']}.yaml"
    path.write_text(yaml.safe_dump(raw))
    spec = plan(load(path), {})[TARGET]
    modules = frameworks.get("verl").environment(spec, RunDirectories(work, work / "store/assets"))[
        "VERL_USE_EXTERNAL_MODULES"
    ]
    raw["target"]["environment"] |= {
        "VERL_USE_EXTERNAL_MODULES": f"{modules},engine_faults",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/engines")]),
        "ENGINE_FAULT": fault,
    }
    path.write_text(yaml.safe_dump(raw))
    alignment = load(path)
    runs = plan(alignment, {})
    return Jobs(alignment, runs, pairs(runs))


def _refined(found: Diagnosis, jobs: Jobs, store: Path, servers: ForkServers) -> Diagnosis:
    """The diagnosis after both engines' suspects were looked at again, as `rlprobe refine` does."""
    results = Path(jobs.results)
    replace_text(results / diagnosis.NAME, json.dumps(found.as_dict()))
    asked = suspects.find(results, 64)
    assert asked.suspects is not None, asked.reason
    sides = [
        Run.open(store, launch(spec, store, start=servers).parent.name)
        for spec in refining(jobs.alignment, asked.suspects).values()
    ]
    refined.write(results, refined.refine(asked, asked.suspects, *sides))
    third = substituted(jobs.alignment, asked.suspects, sides[0].key)
    assert third is not None
    run = Run.open(store, launch(third, store, start=servers).parent.name)
    substitution.write_found(results, substitution.look(results, asked, asked.suspects, run))
    return decide.sharpened(results, found)


@pytest.fixture(scope="module")
def clean(judge: Judge) -> Diagnosis:
    return judge("")


@pytest.mark.long
def test_other_kernels_compute_the_same_responses_alike(clean: Diagnosis) -> None:
    assert clean.verdict == "aligned", clean.sentence
    strip = {cell.stage: cell for cell in clean.stages}
    assert strip[stages.FORCED].state == "aligned"
    # a forward is 39 records and its weights
    assert strip[stages.FORCED].records > SAMPLES * (1 + TOKENS) * 39
    gate = {item.item: item for item in clean.gate}
    assert gate["mock proof"].state == gate["tokens"].state == gate["weights"].state == "open"
    assert stages.FORCED in gate["tokens"].evidence and stages.FORCED in gate["weights"].evidence


@pytest.mark.long
def test_other_angles_part_in_every_forward(judge: Judge) -> None:
    found = judge("rope")
    assert found.verdict == "diverged" and found.first is not None, found.sentence
    first = found.first
    assert (first.stage, first.phase) == (stages.FORCED, "prefill")
    assert first.module is not None and first.module.startswith("model.layers.0.self_attn")
    assert _others_agree(found)


@pytest.mark.long
def test_a_cache_off_by_one_parts_in_decoding_only(judge: Judge) -> None:
    found = judge("cache")
    assert found.first is not None and found.cause is not None, found.sentence
    first = found.first
    assert (first.stage, first.phase, first.token) == (stages.FORCED, "decode", 1)
    assert first.module is not None and first.module.startswith("model.layers.1.self_attn")
    assert f"prefills of prompt and response: 0 of {SAMPLES} part" in found.cause.evidence
    assert _others_agree(found)


@pytest.mark.long
def test_a_temperature_applied_twice_parts_in_what_is_sampled(judge: Judge) -> None:
    found = judge("temperature")
    assert found.first is not None and found.cause is not None, found.sentence
    first = found.first
    assert (first.stage, first.module, first.phase) == (stages.FORCED, None, "decode")
    assert first.operator == forced.log_probs("decode")
    assert found.cause.class_ == "sampling_semantics", found.cause
    assert "at 0.7 times the benchmark's temperature" in found.cause.statement
    assert _others_agree(found)


@pytest.mark.long
def test_weights_that_the_engine_did_not_take_shut_the_gate(judge: Judge) -> None:
    found = judge("kept")
    assert found.verdict == "not_comparable", found.sentence
    assert f"{stages.FORCED}: " in found.sentence and ".layers.1." in found.sentence


@pytest.mark.long
def test_a_vocabulary_that_is_padded_otherwise_is_no_fault(judge: Judge) -> None:
    found = judge("padding")
    assert found.verdict == "aligned", found.sentence


@pytest.mark.long
@pytest.mark.parametrize(("fault", "cause"), [("nucleus", "nonfinite"), ("behind", "unknown")])
def test_other_log_probs_of_the_same_logits_part_in_what_is_sampled(
    judge: Judge, fault: str, cause: str
) -> None:
    """Of a part of the vocabulary alone (a recorded token beyond it has none), or of the token
    before: all layers agree."""
    found = judge(fault)
    assert found.first is not None and found.cause is not None, found.sentence
    first = found.first
    assert (first.stage, first.module, first.phase) == (stages.FORCED, None, "decode")
    assert first.operator == forced.log_probs("decode")
    assert found.cause.class_ == cause, found.cause
    assert f"prefills of prompt and response: 0 of {SAMPLES} part" in found.cause.evidence
    assert _others_agree(found)


@pytest.mark.long
def test_keys_of_other_tokens_in_a_prompts_beginning_part_in_the_prefill(judge: Judge) -> None:
    found = judge("prefix")
    assert found.first is not None, found.sentence
    first = found.first
    assert (first.stage, first.phase) == (stages.FORCED, "prefill")
    assert first.module is not None and first.module.startswith("model.layers.1.self_attn")
    assert _others_agree(found)


@pytest.mark.long
def test_another_epsilon_of_one_layer_parts_at_its_norm(judge: Judge) -> None:
    found = judge("epsilon", again=True)
    assert found.first is not None and found.cause is not None, found.sentence
    first = found.first
    assert (first.stage, first.phase) == (stages.FORCED, "prefill")
    assert first.module == "model.layers.1.post_attention_layernorm"
    assert (found.cause.class_, found.cause.known) == ("hyperparameter", diagnosis.OBSERVED)
    assert "epsilon 0.01 on the target instead of 1e-06" in found.cause.statement
    assert _others_agree(found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("scale", "attn.impl.scale 0.194454 on the target instead of 0.176777"),
        ("cap", "attn.impl.logits_soft_cap 0.5 on the target instead of 0"),
    ],
)
def test_what_an_opaque_attention_was_told_otherwise_is_named(
    judge: Judge, fault: str, said: str
) -> None:
    """Its operator shows no number of it: the target's makes the benchmark's outputs with the
    benchmark's number."""
    found = judge(fault, again=True)
    assert found.first is not None and found.cause is not None, found.sentence
    assert found.first.module == "model.layers.1.self_attn.attn"
    assert (found.cause.class_, found.cause.known) == ("hyperparameter", diagnosis.REPRODUCED)
    assert said.removeprefix("attn.") in found.cause.statement
    assert found.cause.statement in found.sentence
    assert "nothing else is wrong in this stage" in " ".join(found.cause.evidence)


@pytest.mark.long
def test_a_token_that_one_engine_puts_in_front_is_said(judge: Judge) -> None:
    with pytest.raises(RunError, match="other ones from token 0 on: it, or a plugin of it"):
        judge("opening")


def _others_agree(found: Diagnosis) -> bool:
    """Training goes on with what was recorded: the engine's fault is in no other stage."""
    others = [cell for cell in found.stages if cell.stage not in stages.ENGINE_STAGES]
    return bool(others) and all(cell.beyond == 0 for cell in others)
