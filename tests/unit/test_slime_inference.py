"""The inference side: which forwards count, and prompts alone on both sides."""

from __future__ import annotations

import asyncio
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from rlprobe.errors import ConfigError, HookError
from rlprobe.frameworks import prompts
from rlprobe.frameworks.engines.sglang import is_probe
from rlprobe.frameworks.slime import prompts_only, sglang


@pytest.fixture(autouse=True)
def stances(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine's process was told of its compiler; nothing of it outlives a test."""
    said: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", said.append)
    # set first, so that it is taken back after the test whoever sets it
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    return said


class Mode:
    def __init__(self, idle: bool = False) -> None:
        self.idle = idle

    def is_idle(self) -> bool:
        return self.idle


def batch(tokens: int, total: int | None = None, rids: Any = None, idle: bool = False) -> Any:
    return types.SimpleNamespace(
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        seq_lens_sum=tokens if total is None else total,
        rids=rids,
        forward_mode=Mode(idle),
    )


@pytest.mark.parametrize(
    ("forward", "probe"),
    [
        (batch(1), True),
        (batch(1, rids=["HEALTH_CHECK_1795978218.2"]), True),
        (batch(0, idle=True), True),
        (batch(17), False),
        # one token, but the next of a sequence: a decode step
        (batch(1, total=18), False),
        (batch(1, rids=["5f3a"]), False),
        (batch(2, rids=["HEALTH_CHECK_1", "5f3a"]), False),
    ],
)
def test_which_forwards_no_rollout_asked_for(forward: Any, probe: bool) -> None:
    assert is_probe(forward) is probe


class Debugger:
    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, **kwargs: Any) -> None:
        self.said.append("start")

    def stop(self) -> None:
        self.said.append("stop")

    def step(self) -> None:
        self.said.append("step")


class ServerArgs:
    def __init__(self, **more: Any) -> None:
        self.disable_cuda_graph = False
        self.skip_server_warmup = True
        self.msprobe_dump_config = None
        vars(self).update(more)


def runner_module(own: Debugger | None = None) -> types.ModuleType:
    """SGLang's model runner, as 0.5.11 with a debugger of its own and as 0.5.10 without."""

    class ModelRunner:
        def __init__(self, model_config: Any, server_args: ServerArgs) -> None:
            self.model = "model"
            self.graph = not server_args.disable_cuda_graph
            if own is not None:
                self.msprobe_debugger = own

        def forward(self, forward_batch: Any, skip_attn_backend_init: bool = False) -> str:
            debugger = getattr(self, "msprobe_debugger", None)
            if debugger is not None:
                debugger.start()
                debugger.stop()
                debugger.step()
            return f"{forward_batch.input_ids.numel()} {skip_attn_backend_init}"

    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    module.ModelRunner = ModelRunner  # type: ignore[attr-defined]
    return module


def test_sglangs_own_dump_does_not_count_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sglang.CONFIG, raising=False)
    own = Debugger()
    module = runner_module(own)
    sglang.patch(module)
    runner = module.ModelRunner("config", ServerArgs())
    assert runner.forward(batch(1)) == "1 False"
    assert own.said == []
    assert runner.forward(batch(9), skip_attn_backend_init=True) == "9 True"
    assert own.said == ["start", "stop", "step"]
    assert runner.msprobe_debugger is own


def test_below_0_5_11_the_dump_is_made_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Debugger()
    monkeypatch.setenv(sglang.CONFIG, "/x/config.json")
    monkeypatch.setattr(sglang, "_debugger", lambda config: made)
    module = runner_module()
    sglang.patch(module)
    runner = module.ModelRunner("config", ServerArgs())
    assert runner.graph is False, "a CUDA graph runs no hooks"
    assert "CUDA graph is off" in capsys.readouterr().err
    for forward in (batch(1), batch(0, idle=True)):
        runner.forward(forward)
    assert made.said == []
    runner.forward(batch(9))
    runner.forward(batch(1, total=10))
    assert made.said == ["start", "stop", "step"] * 2


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("asked", [None, "0"])
def test_an_engine_that_is_dumped_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, stances: list[str], own: bool, asked: str | None
) -> None:
    if asked is not None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", asked)
    monkeypatch.delenv(sglang.CONFIG, raising=False)
    monkeypatch.setattr(sglang, "_debugger", lambda config: Debugger())
    module = runner_module()
    sglang.patch(module)
    module.ModelRunner("config", ServerArgs())
    assert stances == [], "no dump, nothing changed"
    if not own:
        monkeypatch.setenv(sglang.CONFIG, "/x/config.json")
    module.ModelRunner("config", ServerArgs(msprobe_dump_config="/y.json" if own else None))
    assert stances == (["force_eager"] if asked is None else [])
    assert os.environ["TORCHDYNAMO_DISABLE"] == (asked or "1")


def test_a_dump_asked_for_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.CONFIG, "/x/config.json")
    module = runner_module()
    sglang.patch(module)
    with pytest.raises(HookError, match="dumped twice"):
        module.ModelRunner("config", server_args=ServerArgs(msprobe_dump_config="/y.json"))


def test_a_server_that_warms_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sglang.CONFIG, "/x/config.json")
    module = runner_module()
    sglang.patch(module)
    with pytest.raises(HookError, match="warms up"):
        module.ModelRunner("config", ServerArgs(skip_server_warmup=False))


def test_another_sglang_is_refused_by_name() -> None:
    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    with pytest.raises(HookError, match=r"no ModelRunner\.forward"):
        sglang.patch(module)


FITTING: dict[str, Any] = {
    "data_pad_size_multiplier": 1,
    "micro_batch_size": 1,
    "sglang_max_running_requests": 1,
    "sglang_disable_radix_cache": True,
    "sglang_chunked_prefill_size": -1,
    "rollout_num_gpus_per_engine": 2,
    "tensor_model_parallel_size": 2,
}


def test_arguments_that_fit() -> None:
    assert prompts_only.problems(types.SimpleNamespace(**FITTING)) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_pad_size_multiplier", 128),
        ("micro_batch_size", 4),
        ("use_dynamic_batch_size", True),
        ("balance_data", True),
        ("context_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("sglang_max_running_requests", None),
        ("sglang_disable_radix_cache", False),
        ("sglang_chunked_prefill_size", 8192),
        ("rollout_num_gpus_per_engine", 4),
        ("custom_generate_function_path", "agent.generate"),
    ],
)
def test_each_argument_in_the_way_is_named_with_the_reason(name: str, value: Any) -> None:
    found = prompts_only.problems(types.SimpleNamespace(**{**FITTING, name: value}))
    assert len(found) == 1
    assert f"--{name.replace('_', '-')}" in found[0]
    assert "needed" in found[0]


def test_the_padding_multiplier_counts_where_it_is_not_given() -> None:
    args = types.SimpleNamespace(**{k: v for k, v in FITTING.items() if "pad" not in k})
    assert "found 128" in prompts_only.problems(args)[0]


class Manager:
    def __init__(self, args: Any, pg: Any) -> None:
        self.args = args


def test_one_token_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prompts.ENV, "1")
    args = types.SimpleNamespace(**FITTING, rollout_max_response_len=512)
    made = Manager.__new__(Manager)
    prompts_only.around_manager_init(Manager.__init__, made, (args, None), {})
    assert made.args.rollout_max_response_len == 1
    with pytest.raises(ConfigError, match="balance-data"):
        bad = types.SimpleNamespace(**FITTING, balance_data=True)
        prompts_only.around_manager_init(Manager.__init__, made, (bad, None), {})


def test_off_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prompts.ENV, raising=False)
    args = types.SimpleNamespace(rollout_max_response_len=512)
    made = Manager.__new__(Manager)
    prompts_only.around_manager_init(Manager.__init__, made, (args, None), {})
    assert made.args.rollout_max_response_len == 512
    module = types.ModuleType("slime.rollout.sglang_rollout")
    prompts_only.patch_generation(module)


def test_the_variable_is_0_or_1() -> None:
    assert prompts.wanted({prompts.ENV: "1"})
    assert not prompts.wanted({})
    with pytest.raises(ConfigError, match="PROMPTS_ONLY: found 'yes'"):
        prompts.wanted({prompts.ENV: "yes"})


def generation_module(answers: dict[str, Any]) -> types.ModuleType:
    """slime's generation over an engine that answers from a table."""
    module = types.ModuleType("slime.rollout.sglang_rollout")
    asked: list[dict[str, Any]] = []

    async def post(url: str, payload: Any = None, headers: Any = None) -> Any:
        await asyncio.sleep(0)
        if not url.endswith("/generate"):
            return "unchanged"
        asked.append(payload)
        return answers[str(payload["input_ids"])]

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        payload = {"sampling_params": sampling_params, "input_ids": sample.tokens}
        output = await module.post("http://engine/generate", payload, headers=None)
        sample.tokens = [*sample.tokens, 99]
        sample.response_length += 1
        sample.rollout_log_probs = [output["meta_info"]["output"]]
        return sample

    vars(module).update(post=post, generate=generate, asked=asked)
    return module


def answer(prompt: list[int]) -> dict[str, Any]:
    entries = [(None if i == 0 else -0.1 * i, token, None) for i, token in enumerate(prompt)]
    return {"meta_info": {"input_token_logprobs": entries, "output": -9.0}}


def test_a_sample_becomes_the_prompt_with_the_engines_log_probs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two samples at once: each gets the answer to its own request."""
    monkeypatch.setenv(prompts.ENV, "1")
    asked = [[5, 6, 7], [8, 9]]
    module = generation_module({str(p): answer(p) for p in asked})
    prompts_only.patch_generation(module)

    async def both() -> list[Any]:
        samples = [types.SimpleNamespace(tokens=p, response_length=0) for p in asked]
        return await asyncio.gather(
            *(module.generate("args", s, {"max_new_tokens": 64}) for s in samples)
        )

    first, second = asyncio.run(both())
    assert first.tokens == [5, 6, 7]
    assert first.response_length == 2
    assert first.loss_mask == [1, 1]
    assert first.rollout_log_probs == pytest.approx([-0.1, -0.2])
    assert second.tokens == [8, 9]
    assert second.rollout_log_probs == pytest.approx([-0.1])
    for payload in module.asked:
        assert payload["logprob_start_len"] == 0
        assert payload["sampling_params"]["max_new_tokens"] == 1


def test_other_requests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prompts.ENV, "1")
    module = generation_module({})
    prompts_only.patch_generation(module)
    assert (
        asyncio.run(module.post("http://engine/abort_request", {"abort_all": True})) == "unchanged"
    )


@pytest.mark.parametrize("entries", [[], [(None, 5, None)], [(None, 5, None), (-1.0, 9, None)]])
def test_log_probs_of_other_tokens_are_refused(entries: list[Any]) -> None:
    sample = types.SimpleNamespace(tokens=[5, 6, 7], response_length=1)
    with pytest.raises(HookError, match="expected the prompt's own"):
        prompts_only.prompt_alone(sample, {"input_token_logprobs": entries})


def test_a_slime_that_generates_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prompts.ENV, "1")
    with pytest.raises(HookError, match="no function generate"):
        prompts_only.patch_generation(types.ModuleType("slime.rollout.sglang_rollout"))


def test_the_documented_names_are_these(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "slime.md"
    text = guide.read_text(encoding="utf-8")
    for name in (prompts.ENV, sglang.CONFIG, "DUMP_ON", "RLPROBE_CONFIG", "RLPROBE_STAGES"):
        assert name in text
