"""verl's servers of an engine: marks, samples, and what dumping asks of the configuration."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")


from rlprobe.capture.session import ENV
from rlprobe.errors import ConfigError, HookError
from rlprobe.frameworks.engines import handover, marks
from rlprobe.frameworks.verl import control
from rlprobe.frameworks.verl.engine import inference, servers
from rlprobe.rollouts.digest import sample_digest
from rlprobe.store import parts
from tests.unit.capture_helpers import session
from tests.unit.engines.stand_ins import (
    GENERATE,
    NS,
    copy_of,
    mark,
    scheduled,
    vllm_module,
)


class Server:
    """verl's server actor as far as the hooks know it."""

    def __init__(self, replica: int = 0) -> None:
        self.replica_rank = replica
        self.config = NS(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
        self.asked: list[str] = []
        self.busy = 0
        self.most = 0

    async def launch_server(self, master_address: Any = None) -> str:
        return os.environ[ENV]

    async def generate(self, prompt_ids: Any, sampling_params: Any, request_id: str) -> Any:
        self.asked.append(request_id)
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0)
        self.busy -= 1
        return NS(token_ids=[len(prompt_ids), 1])


def server(monkeypatch: pytest.MonkeyPatch, told: Any, actor: str = "vllm_server_0_0") -> Any:
    module = types.ModuleType("verl.workers.rollout.vllm_rollout.vllm_async_server")
    module.vLLMHttpServer = copy_of(Server, "vLLMHttpServer")  # type: ignore[attr-defined]
    monkeypatch.setattr(control, "session", lambda: told)
    monkeypatch.setitem(
        sys.modules,
        "ray",
        NS(get_runtime_context=lambda: NS(get_actor_name=lambda: actor)),
    )
    servers.patch(module, "vLLMHttpServer")
    return module.vLLMHttpServer


def ask(target: Any) -> list[Any]:
    async def all_at_once() -> list[Any]:
        asked = target.generate([1, 2], {}, "a"), target.generate([3], {}, request_id="b")
        return list(await asyncio.gather(*asked))

    return asyncio.run(all_at_once())


def test_a_captured_step_is_served_one_request_at_a_time_and_joined_by_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = session(tmp_path, stages=(GENERATE,), token_range=(0, 0), step_end=0, sketch=False)
    monkeypatch.setattr(control, "step", lambda: (0, 1))
    target = server(monkeypatch, told)()
    path = asyncio.run(target.launch_server())
    assert handover.taken() == (
        dataclasses.replace(told, settings={"engine": {"number": 0, "tp": 2, "pp": 1}}),
        handover.Replica(0, 2, 1),
    )
    assert path == os.environ[ENV]
    ask(target)
    assert target.most == 1
    assert target.asked == [mark(0, name="a"), mark(1, name="b")]
    # the engine's process dumps one of them; the manifest says which sample that was
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    request = target.asked[1] + "-0badcafe"
    runner.execute_model(scheduled({request: 1}, new={request: 1}))
    (row,) = parts.captured(tmp_path / "side")
    assert row["samples"] == [sample_digest([3], [1, 1])] and "request" not in row
    assert parts.mock_proof(tmp_path / "side") is None, "request 0 is not known: 1 is not the first"
    first = target.asked[0] + "-0badcafe"
    runner.execute_model(scheduled({first: 1}, new={first: 1}))
    proof = parts.mock_proof(tmp_path / "side")
    assert proof is not None
    assert [(row["stage"], row["rank"], row["samples"]) for row in proof["samples"]] == [
        (GENERATE, 0, [sample_digest(*sample)]) for sample in (([1, 2], [2, 1]), ([3], [1, 1]))
    ]
    # in the next step nothing is captured, and nothing serialised
    monkeypatch.setattr(control, "step", lambda: (1, 2))
    target.asked.clear()
    ask(target)
    assert target.asked == ["a", "b"] and target.most == 2


@pytest.mark.parametrize(
    ("stages", "token_range", "actor"),
    [
        (("actor_update",), (0, 0), "vllm_server_0_0"),
        ((GENERATE,), None, "vllm_server_0_0"),
        ((GENERATE,), (0, 0), "vllm_server_reward_0_0"),
        ((GENERATE,), (0, 0), "sglang_server_teacher_0_0"),
    ],
)
def test_servers_of_nothing_to_dump_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: Any, token_range: Any, actor: str
) -> None:
    told = session(tmp_path, stages=stages, token_range=token_range)
    monkeypatch.setattr(control, "step", lambda: (0, 1))
    target = server(monkeypatch, told, actor)()
    assert asyncio.run(target.launch_server()) == ""
    ask(target)
    assert target.asked == ["a", "b"] and target.most == 2


def test_without_layers_the_first_request_of_a_captured_step_asks_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = session(tmp_path, stages=("actor_update",), provenance=True, step_end=1)
    target = server(monkeypatch, told)()
    assert asyncio.run(target.launch_server()) == os.environ[ENV]
    for step, marked in ((0, True), (1, True), (2, False)):
        now = (step, step + 1)
        monkeypatch.setattr(control, "step", lambda now=now: now)
        target.asked.clear()
        ask(target)
        ask(target)
        first, *others = target.asked
        assert others == ["b", "a", "b"] and target.most == 2, "nothing waits for another"
        own = marks.Mark(step, step + 1, 0, 0, marks.WEIGHTS)
        assert first == (own.on("a") if marked else "a")
        assert marks.find(first) == (own if marked else None)


def test_rays_actors_keep_their_coroutines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls = server(monkeypatch, None)
    assert asyncio.iscoroutinefunction(cls.generate)
    assert asyncio.iscoroutinefunction(cls.launch_server)


def test_another_server_is_refused_only_where_it_would_be_dumped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("verl.workers.rollout.vllm_rollout.vllm_async_server")
    monkeypatch.setattr(control, "session", lambda: None)
    servers.patch(module, "vLLMHttpServer")
    told = session(tmp_path, stages=(GENERATE,), token_range=(0, 0))
    monkeypatch.setattr(control, "session", lambda: told)
    with pytest.raises(HookError, match="vLLMHttpServer has no coroutine launch_server, generate"):
        servers.patch(module, "vLLMHttpServer")


def rollout(name: str, **more: Any) -> dict[str, Any]:
    given = {"name": name, "enforce_eager": True, "enable_prefix_caching": False, **more}
    return {"actor_rollout_ref": {"rollout": given}}


RADIX = {"sglang": {"disable_radix_cache": True}}


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (rollout("vllm"), None),
        (rollout("sglang", engine_kwargs=RADIX), None),
        (rollout("rlprobe_cpu", enforce_eager=False), None),
        (rollout("vllm", enforce_eager=False), "rollout.enforce_eager=true"),
        (rollout("vllm", enable_prefix_caching=True), "rollout.enable_prefix_caching=false"),
        (rollout("sglang"), r"\+actor_rollout_ref.rollout.engine_kwargs.sglang.disable_radix"),
        (rollout("vllm", data_parallel_size=2), "rollout.data_parallel_size=1"),
        (rollout("vllm", disaggregation={"enabled": True}), "disaggregation.enabled=false"),
        (rollout("vllm", mtp={"enable": True, "enable_rollout": True}), "enable_rollout=false"),
        (rollout("trtllm"), "rollout.name=trtllm, whose layers cannot be dumped"),
    ],
)
def test_what_dumping_asks_of_the_configuration(
    tmp_path: Path, config: dict[str, Any], asked: str | None
) -> None:
    told = session(tmp_path, stages=(GENERATE,), token_range=(0, 0))
    off = session(tmp_path, stages=("actor_update",))
    inference.require(off, config)
    if asked is None:
        inference.require(told, config)
        return
    with pytest.raises(ConfigError, match=asked):
        inference.require(told, config)


def test_everything_asked_for_is_named_at_once(tmp_path: Path) -> None:
    told = session(tmp_path, stages=(GENERATE,), token_range=(0, 0))
    config = rollout("vllm", enforce_eager=False, enable_prefix_caching=True)
    with pytest.raises(ConfigError) as raised:
        inference.require(told, config)
    assert "enforce_eager=true actor_rollout_ref.rollout.enable_prefix" in str(raised.value)


def test_registering_imports_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys; from rlprobe.frameworks import verl; verl.activate();"
        "sys.exit(bool({'torch', 'vllm', 'sglang'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, ENV: ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_that_is_not_there_is_named_before_any_worker_starts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def find(wanted: str) -> object:
        asked.append(wanted)
        return None

    monkeypatch.setattr("importlib.util.find_spec", find)
    config = {"actor_rollout_ref": {"rollout": {"name": name}}}
    with pytest.raises(ConfigError, match=rf"found no {name} for .*python.*-m rlprobe"):
        inference.require_installed(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda wanted: object())
    inference.require_installed(config)
    for other in ("rlprobe_cpu", "rlprobe_replay", None):
        inference.require_installed({"actor_rollout_ref": {"rollout": {"name": other}}})
    inference.require_installed({})
    assert asked == [name]
