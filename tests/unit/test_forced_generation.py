"""What `generation: compare` asks of an alignment, and what an engine is led through."""

from __future__ import annotations

import asyncio
import json
import types
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("torch")

from rlprobe import frameworks, stages
from rlprobe.capture.session import CaptureOptions
from rlprobe.cli import main
from rlprobe.config import Alignment
from rlprobe.dumps.key_data import KeyData
from rlprobe.errors import ConfigError, ReplayError
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.engines.forcing import FREE, KEY, Answer, Asked, Scores
from rlprobe.frameworks.verl import control
from rlprobe.frameworks.verl.replay import forced
from rlprobe.judge import forced as forced_judge
from rlprobe.rollouts import Ragged, Rollouts, Sample
from rlprobe.runs.launch import session_of
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec
from rlprobe.store.read import Run
from tests.unit.capture_helpers import session

SPLIT = RunDirectories(Path("/s/scratch/x"), Path("/s/assets"))


def specs(generation: str = "compare", *overrides: str, **changes: Any) -> dict[str, RunSpec]:
    raw: dict[str, Any] = {
        "name": "t",
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2", "critic_path": "builtin:tiny-qwen2-critic"},
        "data": {"train_files": "builtin:arithmetic"},
        "overrides": ["algorithm.adv_estimator=gae", *overrides],
        "generation": generation,
        **changes,
    }
    # slime has no builtin models
    located = raw["framework"] == "verl"
    return plan(Alignment.model_validate_json(json.dumps(raw)), {}, located=located)


def engine(spec: RunSpec) -> str:
    words = frameworks.get("verl").command(spec, SPLIT)
    return dict(w.lstrip("+").partition("=")[::2] for w in words)["actor_rollout_ref.rollout.name"]


def test_every_side_keeps_its_engine_and_runs_the_stage(tmp_path: Path) -> None:
    found = specs(controls={"repeat": True, "high_precision": True, "perturbed": 2})
    for role in ("benchmark", "target", "repeat", "high_precision"):
        assert stages.FORCED in found[role].stages and engine(found[role]) == "rlprobe_cpu"
        told = session_of(found[role], tmp_path, tmp_path).capture
        assert (told.forced_samples, told.forced_tokens) == (8, 8)
    assert found["perturbed1"].stages == () and engine(found["perturbed1"]) == "rlprobe_replay"
    plain = specs("replay")
    assert stages.FORCED not in plain["target"].stages
    assert engine(plain["target"]) == "rlprobe_replay"


def test_runs_without_it_have_the_keys_that_they_had() -> None:
    declared = specs("replay")["target"].declared()
    assert "generation" not in declared and "forced_samples" not in declared["capture"]
    compared = specs()["target"].declared()
    assert compared["generation"] == "compare" and compared["capture"]["forced_tokens"] == 8
    fewer = specs(capture={"forced_tokens": 2})["target"]
    assert fewer.key != specs()["target"].key
    keys = [specs("replay", capture=c)["target"].key for c in ({}, {"forced_tokens": 2})]
    assert keys[0] == keys[1]


def test_vllm_keeps_what_recording_it_needs_and_has_no_double_precision() -> None:
    vllm = ["actor_rollout_ref.rollout.name=vllm"]
    found = specs("compare", *vllm, controls={"high_precision": True})
    command = frameworks.get("verl").command(found["target"], SPLIT)
    assert "actor_rollout_ref.rollout.enforce_eager=true" in command
    environment = frameworks.get("verl").environment(found["target"], SPLIT)
    assert environment["VERL_USE_EXTERNAL_MODULES"].endswith("cpu.vllm")
    assert engine(found["target"]) == "vllm"
    assert stages.FORCED not in found["high_precision"].stages
    assert engine(found["high_precision"]) == "rlprobe_replay"


@pytest.mark.parametrize(
    ("overrides", "changes", "said"),
    [
        (["actor_rollout_ref.rollout.name=sglang"], {}, "accepted: rlprobe_cpu, vllm"),
        (["trainer.use_v1=true"], {}, "set trainer.use_v1=false"),
        ([], {"capture": {"key_data": False}}, "without which no log-prob is kept"),
        (
            [],
            {"capture": {"ranks": [1]}, "benchmark": {"world_size": 2}},
            "recorded as rank 0; add 0",
        ),
        (
            ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.enforce_eager=true"],
            {"benchmark": {"device": "cuda"}, "target": {"device": "cuda"}},
            "compare on vllm: set actor_rollout_ref.rollout.enable_prefix_caching=false",
        ),
    ],
)
def test_what_cannot_be_led_is_refused_before_anything_runs(
    overrides: list[str], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        specs("compare", *overrides, **changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"capture": {"stages": ["actor_update"]}}, "capture.stages leaves out"),
        (
            {"generation": "replay", "capture": {"stages": ["forced_generation"]}},
            "with generation: compare only",
        ),
        ({"controls": {"rejoin": True}}, "accepted: one of the two"),
        ({"generation": "run"}, "accepted: replay or compare"),
        ({"capture": {"forced_tokens": 0}}, "greater than 0"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    raw = {
        "name": "t", "framework": "verl", "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"}, "data": {"train_files": "builtin:arithmetic"},
        "generation": "compare", **changes,
    }  # fmt: skip
    path = tmp_path / "t.yaml"
    path.write_text(json.dumps(raw))
    assert main(["config", "check", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_slime_says_that_it_cannot() -> None:
    with pytest.raises(ConfigError, match="slime's SGLang servers cannot be led"):
        specs(framework="slime", framework_version="0.2.2", overrides=[], model={"path": "/m"},
              data={"train_files": "/d"})  # fmt: skip


def rollouts(ragged: bool) -> Rollouts:
    """Three rows of two samples: [1, 2] -> [7, 8, 9] twice, and [3] -> [4]."""
    pairs = [([1, 2], [7, 8, 9]), ([1, 2], [7, 8, 9]), ([3], [4])]
    samples = [Sample.build(str(n), "p", *pair) for n, pair in enumerate(pairs)]
    if ragged:
        tensors: dict[str, Any] = {
            name: Ragged.from_rows([pair[side] for pair in pairs])
            for side, name in enumerate(("prompts", "responses"))
        }
    else:
        tensors = {
            "prompts": np.array([[1, 2], [1, 2], [0, 3]]),
            "responses": np.array([[7, 8, 9], [7, 8, 9], [4, 0, 0]]),
            "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
        }
    return Rollouts(0, 1, tensors=tensors, samples=samples)


class Engine:
    """verl's client of an engine that answers, or generates in spite of all."""

    def __init__(self, answers: bool = True) -> None:
        self.asked: list[tuple[list[int], Asked]] = []
        self._answers = answers
        self._busy = self.greedy = 0

    async def generate(self, request_id: str, prompt_ids: Any, sampling_params: Any) -> Any:
        if sampling_params.get(FREE):
            return await self._free(prompt_ids, sampling_params)
        asked = Asked.of(sampling_params)
        assert asked is not None and sampling_params["temperature"] == 0.7
        self.asked.append((prompt_ids, asked))

        def scores(count: int) -> Scores:
            return Scores([-1.0] * count, asked.response[:count], [0.5] * count)

        answer = Answer(scores(len(asked.response)), scores(asked.tokens)).as_dict()
        return types.SimpleNamespace(extra_fields={KEY: answer} if self._answers else {})

    async def _free(self, prompt: list[int], sampling: dict[str, Any]) -> Any:
        """Of [3] another token where somebody else is asked for at the same time; of [1, 2] one
        that is drawn by the seed, and greedily another one each time that nobody else is.
        """
        assert sampling["max_tokens"] == 1
        self._busy += 1
        await asyncio.sleep(0)
        token = 40 if prompt == [3] and self._busy > 1 else 4
        if sampling["temperature"]:
            assert sampling["temperature"] == 0.7
            token += sampling["seed"]
        else:
            assert "seed" not in sampling
            self.greedy += prompt == [1, 2] and self._busy == 1
            token += self.greedy if prompt == [1, 2] and self._busy == 1 else 0
        await asyncio.sleep(0)
        self._busy -= 1
        return types.SimpleNamespace(token_ids=[token], log_probs=[-0.5 - token / 100])


class Recorded:
    """A run as far as its key data are asked for."""

    def __init__(self, recorded: KeyData) -> None:
        self.recorded = recorded


def lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Engine, ragged: bool) -> Any:
    own = session(tmp_path, stages=(stages.FORCED,), forced_tokens=1, forced_samples=2, step_end=0)
    monkeypatch.setattr(control, "step", lambda: (0, 1))
    section = types.SimpleNamespace(rollout=types.SimpleNamespace(temperature=0.7))
    manager = types.SimpleNamespace(
        llm_client=told, config=types.SimpleNamespace(actor_rollout_ref=section)
    )
    asyncio.run(forced.lead(own, manager, rollouts(ragged), "here"))
    return own


@pytest.mark.parametrize("ragged", [True, False])
def test_each_sample_is_asked_once_without_its_padding_and_its_answer_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ragged: bool
) -> None:
    told = Engine()
    own = lead(tmp_path, monkeypatch, told, ragged)
    assert [(p, a.response, a.number) for p, a in told.asked] == [
        ([1, 2], [7, 8, 9], 0), ([3], [4], 1),
    ]  # fmt: skip
    data = KeyData(Path(own.dump) / "data")
    rows = data.rows("forced_prefill_choices", 0)
    assert [row.values.tolist() for row in rows] == [[7, 8, 9], [4]]
    assert [row.sample for row in rows] == [a.sample for _, a in told.asked]
    assert [len(row.values) for row in data.rows("forced_decode_log_probs", 0)] == [1, 1]
    assert all(row.response_at == 0 for row in rows)
    # of the same prompts, alone, again and in a batch
    told_twice = forced_judge.repeated(cast("Run", Recorded(data)), 0)
    assert told_twice == forced_judge.Repeated(2, again=1, same=0, drawn=1, largest=None)
    assert [row.values.tolist() for row in data.rows("free_drawn_alone_tokens", 0)] == [
        [4 + own.seed], [5 + own.seed],
    ]  # fmt: skip


def test_an_engine_without_hooks_is_an_error_and_not_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ReplayError, match="generated instead of being led"):
        lead(tmp_path, monkeypatch, Engine(answers=False), ragged=True)


def test_a_step_that_is_not_captured_leads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = session(tmp_path, stages=(stages.FORCED,), step_end=0)
    monkeypatch.setattr(control, "step", lambda: (1, 2))
    assert not forced.wanted(own)
    monkeypatch.setattr(control, "step", lambda: (0, 1))
    assert forced.wanted(own)
    assert CaptureOptions().forced_tokens == 0
