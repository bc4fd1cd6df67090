"""Engines' model runners: what is dumped, of which request?"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import polars as pl
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.errors import HookError, RunError  # noqa: E402
from rlprobe.frameworks.engines import forwards, marks, sglang, vllm  # noqa: E402
from rlprobe.store import parts  # noqa: E402
from tests.unit.capture_helpers import Tiny, make  # noqa: E402
from tests.unit.engines.stand_ins import (  # noqa: E402
    GENERATE,
    NS,
    VllmRunner,
    captured,
    copy_of,
    dumped,
    embedded,
    give,
    mark,
    scheduled,
    vllm_module,
)


def test_a_mark_survives_what_an_engine_appends() -> None:
    given = marks.Mark(3, 4, 1, 7)
    assert marks.find(given.on("5f3a") + "-0badcafe") == given
    assert marks.find("5f3a") is None and marks.find("HEALTH_CHECK_1") is None


@pytest.mark.parametrize("engine", ["light", pytest.param("msprobe", marks=pytest.mark.slow)])
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


def test_what_an_engine_may_write_is_for_both_of_its_stages(tmp_path: Path) -> None:
    """Layers of what it generates, and of responses that it is led through."""
    give(
        tmp_path, stages=(GENERATE, "forced_generation"), tensors=True, budget_mib=1,
        forced_tokens=1,
    )  # fmt: skip
    runner = vllm_module().GPUModelRunner()
    runner.load_model()
    led = marks.Mark(0, 1, 0, 0, "prefill").on("abc")
    big = 4000
    runner.execute_model(scheduled({mark(0): big}, new={mark(0): big}))
    written = sum(f.stat().st_size for f in (tmp_path / "dump").rglob("*") if f.is_file())
    assert written > 1 << 20
    with pytest.raises(RunError, match=r"budget of 1 MiB is spent .* step 0, forced_generation"):
        runner.execute_model(scheduled({led: big}, new={led: big}))
    # what has begun is finished
    runner.execute_model(scheduled({mark(1): 7}, new={mark(1): 7}))
    assert embedded(tmp_path) == [[big], [7]]


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
    runner = module.ModelRunner(**options)
    runner.load_model()
    return runner


def forward_batch(rid: str, tokens: int, decode: bool = False) -> Any:
    return NS(rids=[rid], input_ids=torch.arange(tokens), forward_mode=Mode(decode))


@pytest.mark.parametrize("engine", ["light", pytest.param("msprobe", marks=pytest.mark.slow)])
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


def test_where_no_layers_are_dumped_the_weights_are_digested_once_a_step(tmp_path: Path) -> None:
    """Graphs hide nothing of weights, and other requests may be in the same forward."""
    give(tmp_path, stages=("actor_update",), token_range=None, provenance=True, step_end=1)
    runner = vllm_module().GPUModelRunner(eager=False)
    runner.load_model()
    for step in (0, 1, 2):
        first = marks.Mark(step, step + 1, 0, 0, marks.WEIGHTS).on(f"s{step}")
        other = f"other{step}"
        runner.execute_model(scheduled({first: 4, other: 3}, new={first: 4, other: 3}))
        runner.execute_model(scheduled({first: 1, other: 1}, computed={first: 4, other: 3}))
        with torch.no_grad():
            runner.model.embed.weight += 1.0
    assert not dumped(tmp_path) and not captured(tmp_path)
    table = parts.weights(tmp_path / "side")
    assert table is not None
    names = [name for name, _ in runner.model.named_parameters()]
    assert table["step"].to_list() == [0] * len(names) + [1] * len(names)
    assert set(table["stage"]) == {"actor_generate_sequences"} and set(table["role"]) == {"rollout"}
    changed = table.group_by("name").agg(n=pl.col("digest").n_unique())
    assert dict(changed.iter_rows()) == {n: 2 if n == "embed.weight" else 1 for n in names}
