"""An engine that is led through a response: vLLM's sampler and runner, verl's server."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rlprobe import stages
from rlprobe.errors import ReplayError
from rlprobe.frameworks.engines import marks, vllm
from rlprobe.frameworks.engines.forcing import KEY, Answer, Asked
from rlprobe.frameworks.verl import control
from rlprobe.frameworks.verl.engine import vllm_forced
from rlprobe.store import parts
from tests.unit.capture_helpers import session
from tests.unit.engines.stand_ins import NS, VllmRunner, copy_of, give, scheduled

VOCABULARY = 12


class Sampler:
    """vLLM's sampler as far as it is hooked: greedy, at half the temperature."""

    def __call__(self, logits: Any, sampling_metadata: Any = None) -> Any:
        sampled, processed = self.sample(logits, sampling_metadata)
        return NS(tokens=sampled, log_probs=processed.gather(-1, sampled[:, None])[:, 0])

    def sample(self, logits: Any, sampling_metadata: Any) -> Any:
        return logits.argmax(-1), (logits / 0.5).log_softmax(-1)


class Runner(VllmRunner):
    """Its model runner, which samples after a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Any] = {}
        self.sampler: Any = None

    def _sample(self, logits: Any, spec_decode_metadata: Any = None) -> Any:
        return self.sampler(logits)


@pytest.fixture
def runner(tmp_path: Path) -> Any:
    give(tmp_path, stages=(stages.FORCED,), token_range=None, replica=1)
    sampler = types.ModuleType("vllm.v1.sample.sampler")
    sampler.Sampler = copy_of(Sampler, "Sampler")  # type: ignore[attr-defined]
    vllm.patch_sampler(sampler)
    module = types.ModuleType("vllm.v1.worker.gpu_model_runner")
    members = {**vars(VllmRunner), **vars(Runner)}
    names = {k: v for k, v in members.items() if k not in ("__dict__", "__weakref__")}
    module.GPUModelRunner = type("GPUModelRunner", (), names)  # type: ignore[attr-defined]
    vllm.patch(module)

    def init(self: Any) -> None:
        VllmRunner.__init__(self)
        self.requests, self.sampler = {}, sampler.Sampler()

    module.GPUModelRunner.__init__ = init
    found = module.GPUModelRunner()
    found.load_model()
    return found


def request(phase: str, number: int = 0, tokens: list[int] | None = None) -> tuple[str, Any]:
    mark = marks.Mark(0, 1, 1, number, phase)
    extra = None if tokens is None else {KEY: tokens}
    return mark.on("abc"), NS(sampling_params=NS(extra_args=extra))


def decoded(runner: Any, rid: str, prompt: int, count: int) -> list[Any]:
    """Run a request: its prompt, then a token at a time; what was sampled of each."""
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None]
    found = []
    for number in range(count):
        plan = (
            scheduled({rid: prompt}, new={rid: prompt})
            if number == 0
            else scheduled({rid: 1}, computed={rid: prompt + number - 1})
        )
        runner.execute_model(plan)
        found.append(runner._sample(logits))
    return found


def lines(root: Path) -> list[dict[str, Any]]:
    path = root / "side/parts/captured/rollout-rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_response_is_chosen_and_its_log_prob_is_of_what_was_drawn_from(
    runner: Any, tmp_path: Path
) -> None:
    rid, state = request("decode", tokens=[3, 1, 4])
    runner.requests[rid] = state
    outputs = decoded(runner, rid, prompt=5, count=3)
    assert [int(o.tokens[0]) for o in outputs] == [3, 1, 4]
    expected = (torch.arange(VOCABULARY) / 0.5).log_softmax(-1)
    assert [float(o.log_probs[0]) for o in outputs] == [float(expected[t]) for t in (3, 1, 4)]
    # replica 1 leads, and its first process is recorded as rank 0, as on the other side
    found = [(row["stage"], row["forward"], row["request"]) for row in lines(tmp_path)]
    assert found == [
        (stages.FORCED, [phase, token], "forced:0:1:0")
        for phase, token in (("prompt", 0), ("decode", 1), ("decode", 2))
    ]


def test_a_prefill_in_pieces_is_prefill_and_chooses_nothing(runner: Any, tmp_path: Path) -> None:
    rid, state = request("prefill")
    runner.requests[rid] = state
    runner.execute_model(scheduled({rid: 4}, new={rid: 9}))
    runner.execute_model(scheduled({rid: 5}, computed={rid: 4}))
    sampled = runner._sample(torch.arange(VOCABULARY, dtype=torch.float32)[None])
    assert int(sampled.tokens[0]) == VOCABULARY - 1
    assert [row["forward"] for row in lines(tmp_path)] == [["prefill", 0], ["prefill", 0]]


def test_what_is_generated_is_drawn_as_ever(runner: Any, tmp_path: Path) -> None:
    rid = marks.Mark(0, 1, 0, 0).on("abc")
    (sampled,) = decoded(runner, rid, prompt=5, count=1)
    assert int(sampled.tokens[0]) == VOCABULARY - 1
    assert not (tmp_path / "side/parts/captured").exists()


class Server:
    """verl's server: an engine that is asked, and answers with what the sampler would choose."""

    replica_rank = 0
    lora_as_adapter = False

    def __init__(self, length: int = 64, obeys: bool = True, runs: Any = list) -> None:
        self.config = NS(max_model_len=length)
        self._runs = runs
        self.engine = self
        self.asked: list[Any] = []
        self._obeys = obeys

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any
    ) -> Any:
        self.asked.append((request_id, prompt["prompt_token_ids"], sampling_params))
        tokens = self._runs(prompt["prompt_token_ids"])
        forced = (sampling_params.get("extra_args") or {}).get(KEY, [0])
        chosen = forced if self._obeys else [9] * len(forced)

        def scores(token: int) -> dict[int, Any]:
            own = {} if token == 11 else {token: NS(logprob=-2.0)}
            return {**own, 11: NS(logprob=-0.5), 10: NS(logprob=-0.75)}

        yield NS(
            prompt_token_ids=tokens,
            prompt_logprobs=[None, *[scores(token) for token in tokens[1:]]],
            outputs=[NS(token_ids=chosen, logprobs=[scores(token) for token in chosen])],
        )


@pytest.fixture
def verl_and_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server's part imports of both."""
    module = types.ModuleType("vllm")
    module.SamplingParams = dict  # type: ignore[attr-defined]
    inputs = types.ModuleType("vllm.inputs")
    inputs.TokensPrompt = dict  # type: ignore[attr-defined]
    replica = types.ModuleType("verl.workers.rollout.replica")
    replica.TokenOutput = NS  # type: ignore[attr-defined]
    for name, found in (
        ("vllm", module), ("vllm.inputs", inputs), ("verl.workers.rollout.replica", replica),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, found)
    for name in ("verl", "verl.workers", "verl.workers.rollout"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(control, "step", lambda: (0, 1))


ASKED = Asked(0, "sha256:s", [7, 11, 5, 6], 2)


def led(tmp_path: Path, server: Server) -> Any:
    call = {"prompt_ids": [1, 2], "sampling_params": {"temperature": 0.7}}
    own = session(tmp_path, stages=(stages.FORCED,))
    return asyncio.run(vllm_forced.led(own, server, asyncio.Lock(), call, ASKED))


def test_a_sample_is_asked_for_whole_and_token_by_token(
    tmp_path: Path, verl_and_vllm: None
) -> None:
    server = Server()
    answer = Answer.from_dict(led(tmp_path, server).extra_fields[KEY])
    assert answer.prefill.log_probs == [-2.0, -0.5, -2.0, -2.0]
    assert answer.prefill.choices == [11] * 4 and set(answer.prefill.margins) == {0.25}
    assert answer.decode.log_probs == [-2.0, -0.5], "the first two tokens"
    (whole, tokens, prefill), (stepwise, prompt, decode) = server.asked
    assert (marks.find(whole).phase, marks.find(stepwise).phase) == ("prefill", "decode")
    assert (tokens, prompt) == ([1, 2, 7, 11, 5, 6], [1, 2])
    assert prefill["prompt_logprobs"] == 2 and prefill["max_tokens"] == 1
    assert decode["extra_args"] == {KEY: [7, 11]} and decode["ignore_eos"]
    assert (decode["temperature"], decode["max_tokens"], decode["logprobs"]) == (0.7, 2, 2)
    (row,) = parts._lines(tmp_path / "side", "requests")
    assert row[1] == {"request": "forced:0:0:0", "sample": "sha256:s"}


def test_a_sample_as_long_as_the_model_reads_is_cut_by_what_the_engine_needs(
    tmp_path: Path, verl_and_vllm: None
) -> None:
    server = Server(length=6)
    answer = Answer.from_dict(led(tmp_path, server).extra_fields[KEY])
    assert server.asked[0][1] == [1, 2, 7, 11, 5] and len(answer.prefill.log_probs) == 3


def test_an_engine_that_draws_its_own_tokens_is_no_answer(
    tmp_path: Path, verl_and_vllm: None
) -> None:
    with pytest.raises(ReplayError, match=r"vLLM drew \[9, 9\] where the response has \[7, 11\]"):
        led(tmp_path, Server(obeys=False))


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (lambda tokens: [3, *tokens], "ran 7 tokens .* sent 6, other ones from token 0 on"),
        (lambda tokens: tokens[:-1], "ran 5 tokens .* sent 6, other ones from token 6 on"),
        (lambda tokens: [*tokens, 2], "ran 7 tokens .* sent 6, other ones from token 6 on"),
        (lambda tokens: [1, 3, *tokens[2:]], "ran 6 tokens .* sent 6, other ones from token 1 on"),
    ],
)
def test_an_engine_that_runs_other_tokens_is_no_answer(
    tmp_path: Path, verl_and_vllm: None, runs: Any, said: str
) -> None:
    """One that puts a token in front of every prompt ended in a traceback."""
    with pytest.raises(ReplayError, match=said):
        led(tmp_path, Server(runs=runs))
