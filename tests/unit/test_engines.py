"""Inference engines through stand-ins of their runners: what is dumped, and of which sample?"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.capture.session import ENV  # noqa: E402
from rlprobe.errors import ConfigError, HookError  # noqa: E402
from rlprobe.frameworks.engines import forwards, handover, marks, sglang, vllm  # noqa: E402
from rlprobe.frameworks.verl import control, inference, servers  # noqa: E402
from rlprobe.rollouts.digest import sample_digest  # noqa: E402
from rlprobe.store import parts  # noqa: E402
from tests.unit.capture_helpers import Tiny, make, session  # noqa: E402

GENERATE = "actor_generate_sequences"
NS = types.SimpleNamespace


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of an engine's process outlives a test."""
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setenv(ENV, "")
    for module, name in ((vllm, "vllm"), (sglang, "sglang")):
        monkeypatch.setattr(module, "_forwards", forwards.Forwards(name))
    handover.taken.cache_clear()
    yield
    handover.taken.cache_clear()


def give(root: Path, *, replica: int = 0, tp: int = 1, **options: Any) -> None:
    """Hand a session over to this process, as if it were an engine's."""
    chosen = {"stages": (GENERATE,), "token_range": (0, 1), "sketch": False, **options}
    handover.give(session(root, **chosen), handover.Replica(replica, tp, 1))


def mark(number: int, step: int = 0, name: str = "abc") -> str:
    return marks.Mark(step, step + 1, 0, number).on(name)


def copy_of(cls: type, name: str) -> type:
    """A class of the same methods: hooks are put on classes, and tests must not share them."""
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(name, (), members)


class VllmRunner:
    """vLLM's model runner as far as the hooks know it."""

    def __init__(self, eager: bool = True) -> None:
        self.vllm_config = NS(model_config=NS(enforce_eager=eager))

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model: Any = make(Tiny)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Tensor:
        total = sum(scheduler_output.num_scheduled_tokens.values())
        return self.model(torch.arange(total) % 40)


def vllm_module() -> Any:
    module = types.ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = copy_of(VllmRunner, "GPUModelRunner")  # type: ignore[attr-defined]
    vllm.patch(module)
    return module


def scheduled(
    tokens: dict[str, int],
    new: dict[str, int] | None = None,
    computed: dict[str, int] | None = None,
    done: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput: tokens by request, prompts of new ones, progress of the others."""
    cached = computed or {}
    return NS(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            NS(req_id=rid, prompt_token_ids=[0] * count, num_computed_tokens=0)
            for rid, count in (new or {}).items()
        ],
        scheduled_cached_reqs=NS(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        finished_req_ids=set(done),
    )


def dumped(root: Path, rank: int = 0, step: int = 0) -> dict[str, Any]:
    path = root / "dump" / GENERATE / f"step{step}" / f"rank{rank}" / "dump.json"
    return dict(json.loads(path.read_text())["data"]) if path.exists() else {}


def embedded(root: Path, rank: int = 0) -> list[list[int]]:
    """Shapes of what the embedding was given, call by call."""
    return [
        record["input_args"][0]["shape"]
        for name, record in dumped(root, rank).items()
        if name.startswith("Module.embed.") and ".forward." in name
    ]


def captured(root: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = root / f"side/parts/captured/rollout-rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_mark_survives_what_an_engine_appends() -> None:
    given = marks.Mark(3, 4, 1, 7)
    assert marks.find(given.on("5f3a") + "-0badcafe") == given
    assert marks.find("5f3a") is None and marks.find("HEALTH_CHECK_1") is None


@pytest.mark.parametrize("engine", ["light", "msprobe"])
def test_vllm_dumps_the_tokens_of_the_range_and_nothing_else(tmp_path: Path, engine: str) -> None:
    give(tmp_path, engine=engine)
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    first, second = mark(0), mark(1)
    run = runner.execute_model
    run(scheduled({"other": 5}, new={"other": 5}))  # not this run's
    run(scheduled({first: 4}, new={first: 7}, done=("other",)))  # the prompt in two pieces
    run(scheduled({first: 3}, computed={first: 4}))
    run(scheduled({first: 1}, computed={first: 7}))  # token 1
    run(scheduled({first: 1}, computed={first: 8}))  # token 2, beyond the range
    run(scheduled({second: 6}, new={second: 6}, done=(first,)))
    assert embedded(tmp_path) == [[4], [3], [1], [6]]
    assert [line["request"] for line in captured(tmp_path)] == ["0:0:0"] * 3 + ["0:0:1"]
    assert not runner.model._forward_hooks and not runner.model.embed._forward_hooks


def test_the_range_may_begin_after_the_prompt(tmp_path: Path) -> None:
    give(tmp_path, token_range=(2, 2))
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    request = mark(0)
    runner.execute_model(scheduled({request: 7}, new={request: 7}))
    for token in range(4):
        runner.execute_model(scheduled({request: 1}, computed={request: 7 + token}))
    assert embedded(tmp_path) == [[1]] and len(captured(tmp_path)) == 1


def test_results_are_those_without_hooks(tmp_path: Path) -> None:
    plain = VllmRunner()
    plain.load_model()
    give(tmp_path)
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    work = scheduled({mark(0): 7}, new={mark(0): 7})
    assert torch.equal(plain.execute_model(work), runner.execute_model(work))
    assert embedded(tmp_path) == [[7]]


def test_without_a_session_the_runner_is_left_alone(tmp_path: Path) -> None:
    runner = vllm_module().GPUModelRunner(eager=False)
    runner.load_model()
    # not even the request ids are looked at
    assert runner.execute_model(NS(num_scheduled_tokens={"x": 3})).shape == (3, 40)


def test_a_subclass_that_overrides_the_method_dumps_once(tmp_path: Path) -> None:
    give(tmp_path)
    base = vllm_module().GPUModelRunner

    class NPUModelRunner(base):  # type: ignore[misc,valid-type]
        def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
            return super().execute_model(scheduler_output, intermediate_tensors)

    runner = NPUModelRunner()
    runner.load_model()
    runner.execute_model(scheduled({mark(0): 7}, new={mark(0): 7}))
    assert embedded(tmp_path) == [[7]] and len(captured(tmp_path)) == 1


def test_a_reloaded_model_is_dumped_as_well(tmp_path: Path) -> None:
    give(tmp_path)
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    runner.execute_model(scheduled({mark(0): 7}, new={mark(0): 7}))
    before = dumped(tmp_path)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            parameter.mul_(2)
    runner.execute_model(scheduled({mark(0, 1): 7}, new={mark(0, 1): 7}))
    runner.model = make(lambda: Tiny(width=8))
    runner.execute_model(scheduled({mark(1, 1): 7}, new={mark(1, 1): 7}))
    after = dumped(tmp_path, step=1)
    means = [
        next(v for k, v in found.items() if k.startswith("Module.embed."))["output"][0]["Mean"]
        for found in (before, after)
    ]
    assert means[1] == pytest.approx(2 * means[0], rel=1e-5)
    widths = [v["output"][0]["shape"][-1] for k, v in after.items() if ".embed." in k]
    assert widths == [24, 8]


def test_graphs_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    give(tmp_path)
    runner = vllm_module().GPUModelRunner(eager=False)
    with pytest.raises(HookError, match="enforce_eager=true"):
        runner.load_model()
    assert not hasattr(runner, "model")


class Graph(nn.Module):
    """A model replayed from a graph: its modules do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)

    def __call__(self, *args: Any) -> Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("model", [Graph(), NS(__call__=None)])
def test_a_forward_that_ran_no_hook_is_an_error(tmp_path: Path, model: Any) -> None:
    give(tmp_path)
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    runner.model = model
    with pytest.raises(HookError, match="enforce_eager=true"):
        runner.execute_model(scheduled({mark(0): 7}, new={mark(0): 7}))


def test_mixed_requests_are_refused(tmp_path: Path) -> None:
    give(tmp_path)
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    with pytest.raises(HookError, match="holds 2 requests, 1 of them this run's"):
        runner.execute_model(scheduled({mark(0): 7, "x": 2}, new={mark(0): 7, "x": 2}))


def test_ranks_are_counted_over_the_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "_rank", lambda: 1)
    give(tmp_path, replica=2, tp=2)
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    runner.execute_model(scheduled({mark(0): 7}, new={mark(0): 7}))
    assert embedded(tmp_path, rank=5) == [[7]]
    (layout,) = parts.layout(tmp_path / "side")
    assert (layout["rank"], layout["tp"], layout["tp_rank"], layout["backend"]) == (5, 2, 1, "vllm")


class Mode:
    def __init__(self, decode: bool) -> None:
        self._decode = decode

    def is_decode(self) -> bool:
        return self._decode

    def is_idle(self) -> bool:
        return False


class SglangRunner:
    """SGLang's model runner as far as the hooks know it; it calls ``model.forward``."""

    def __init__(self, draft: bool = False) -> None:
        self.is_draft_worker = draft

    def load_model(self) -> None:
        self.model = make(Tiny)

    @torch.no_grad()
    def forward(self, forward_batch: Any, skip_attn_backend_init: bool = False) -> Tensor:
        result: Tensor = self.model.forward(forward_batch.input_ids)
        return result


def sglang_runner(**options: Any) -> Any:
    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    module.ModelRunner = copy_of(SglangRunner, "ModelRunner")  # type: ignore[attr-defined]
    sglang.patch(module)
    runner = module.ModelRunner(**options)  # type: ignore[attr-defined]
    runner.load_model()
    return runner


def forward_batch(rid: str, tokens: int, decode: bool = False) -> Any:
    return NS(rids=[rid], input_ids=torch.arange(tokens), forward_mode=Mode(decode))


@pytest.mark.parametrize("engine", ["light", "msprobe"])
def test_sglang_dumps_the_tokens_of_the_range(tmp_path: Path, engine: str) -> None:
    give(tmp_path, engine=engine)
    runner = sglang_runner()
    runner.forward(forward_batch("HEALTH_CHECK_1", 1))
    for number, prompt in enumerate((7, 5)):
        runner.forward(forward_batch(mark(number), prompt))
        for _ in range(3):
            runner.forward(forward_batch(mark(number), 1, decode=True))
    assert embedded(tmp_path) == [[7], [1], [5], [1]]
    assert [line["request"] for line in captured(tmp_path)] == ["0:0:0"] * 2 + ["0:0:1"] * 2


def test_sglangs_draft_model_is_left_alone(tmp_path: Path) -> None:
    give(tmp_path)
    sglang_runner(draft=True).forward(forward_batch(mark(0), 7))
    assert dumped(tmp_path) == {}


@pytest.mark.parametrize("patch", [vllm.patch, sglang.patch])
def test_an_engine_without_its_runner_is_refused(patch: Any) -> None:
    with pytest.raises(HookError, match="cannot be dumped"):
        patch(types.ModuleType("other"))


def test_a_spawned_process_finds_hooks_and_session_by_itself(tmp_path: Path) -> None:
    """As vLLM spawns its workers: a fresh interpreter, nothing but the environment."""
    package = tmp_path / "place/vllm/v1/worker"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "gpu_model_runner.py").write_text(
        textwrap.dedent("""
        import torch
        from types import SimpleNamespace as NS

        class GPUModelRunner:
            vllm_config = NS(model_config=NS(enforce_eager=True))

            def load_model(self):
                self.model = torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.Linear(8, 4))

            def execute_model(self, scheduler_output):
                return self.model(torch.arange(7))
        """)
    )
    give(tmp_path)
    request = mark(0)
    script = textwrap.dedent(f"""
        from types import SimpleNamespace as NS
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        runner = GPUModelRunner()
        runner.load_model()
        new = [NS(req_id={request!r}, prompt_token_ids=[0] * 7, num_computed_tokens=0)]
        runner.execute_model(NS(
            num_scheduled_tokens={{{request!r}: 7}}, scheduled_new_reqs=new, finished_req_ids=set(),
            scheduled_cached_reqs=NS(req_ids=[], num_computed_tokens=[]),
        ))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "place")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = sorted(name.removesuffix(".forward.0") for name in dumped(tmp_path))
    assert names == ["Module.0.Embedding", "Module.1.Linear"]


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
        NS(get_runtime_context=lambda: NS(get_actor_name=lambda: actor)),  # type: ignore[arg-type]
    )
    servers.patch(module, "vLLMHttpServer")
    return module.vLLMHttpServer  # type: ignore[attr-defined]


def ask(target: Any) -> list[Any]:
    async def all_at_once() -> list[Any]:
        return await asyncio.gather(
            target.generate([1, 2], {}, "a"), target.generate([3], {}, request_id="b")
        )

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
