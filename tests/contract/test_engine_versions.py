"""Inference engines' published versions: what the hooks rely on is in each wheel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from rlprobe.frameworks.engines import hooks, sglang, vllm
from rlprobe.frameworks.verl import versions
from tests.contract import published
from tests.contract.conftest import CONTRACT

pytestmark = [pytest.mark.slow]

#: Older, the one that verl 0.9.1 pins where it pins one, and newest.
VLLM = ("0.18.0", "0.24.0", "0.33.0")
VLLM_ASCEND = ("0.18.0", "0.23.0")
SGLANG = ("0.5.10", "0.5.12", "0.5.23")


class Source:
    """A module's text, asked about its classes."""

    def __init__(self, file: Path) -> None:
        self.text = file.read_text(encoding="utf-8")
        self._classes = {
            node.name: node for node in ast.parse(self.text).body if isinstance(node, ast.ClassDef)
        }

    def arguments(self, name: str, method: str) -> list[str]:
        """Arguments of a method that the class itself defines."""
        for node in self._classes[name].body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == method:
                return [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
        raise AssertionError(f"{name} defines no {method}")

    def is_coroutine(self, name: str, method: str) -> bool:
        return any(
            isinstance(node, ast.AsyncFunctionDef) and node.name == method
            for node in self._classes[name].body
        )

    def bases(self, name: str) -> list[str]:
        return [ast.unparse(base) for base in self._classes[name].bases]

    def fields(self, name: str) -> set[str]:
        return {
            node.target.id
            for node in self._classes[name].body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def imports(self, module: str, name: str) -> bool:
        return any(
            isinstance(node, ast.ImportFrom)
            and node.module == module
            and name in [alias.name for alias in node.names]
            for node in ast.walk(ast.parse(self.text))
        )


def path(module: str) -> str:
    return module.replace(".", "/") + ".py"


@pytest.mark.cell("engine", "vLLM in verl: runners and requests of 0.18 to 0.33", CONTRACT)
@pytest.mark.parametrize(
    "version", [VLLM[0], pytest.param(VLLM[1], marks=pytest.mark.contract), VLLM[2]]
)
def test_vllm(tmp_path: Path, version: str) -> None:
    output = "vllm/v1/core/sched/output.py"
    processor = "vllm/v1/engine/input_processor.py"
    names = [*(path(module) for module in hooks.VLLM), output, processor]
    root = published.files(f"vllm=={version}", names, tmp_path)
    for module in hooks.VLLM:
        runner = Source(root / path(module))
        assert runner.arguments(vllm.CLASS, "execute_model")[:2] == ["self", "scheduler_output"]
        assert runner.arguments(vllm.CLASS, "load_model")[0] == "self"
        assert "self.model = " in runner.text and "self.vllm_config = " in runner.text
    scheduled = Source(root / output)
    assert scheduled.fields("SchedulerOutput") >= {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "finished_req_ids",
    }
    assert scheduled.fields("NewRequestData") >= {
        "req_id",
        "prompt_token_ids",
        "num_computed_tokens",
    }
    assert scheduled.fields("CachedRequestData") >= {"req_ids", "num_computed_tokens"}
    # what is appended to a request's id follows it, so a mark in front of it stays there
    assert 'request.request_id = f"{request.external_req_id}-' in (root / processor).read_text()


@pytest.mark.cell("engine", "vLLM-Ascend in verl: runners of 0.18 and 0.23", CONTRACT)
@pytest.mark.parametrize("version", VLLM_ASCEND)
def test_vllm_ascend(tmp_path: Path, version: str) -> None:
    runners = {
        "vllm_ascend/worker/model_runner_v1.py": hooks.VLLM[0],
        "vllm_ascend/worker/v2/model_runner.py": hooks.VLLM[1],
    }
    root = published.files(f"vllm-ascend=={version}", list(runners), tmp_path)
    for name, module in runners.items():
        runner = Source(root / name)
        # subclasses of what is wrapped are wrapped too, whatever they override
        assert vllm.CLASS in runner.bases("NPUModelRunner"), name
        assert runner.imports(module, vllm.CLASS), name
    older = Source(root / "vllm_ascend/worker/model_runner_v1.py")
    assert older.arguments("NPUModelRunner", "execute_model")[:2] == ["self", "scheduler_output"]
    assert older.arguments("NPUModelRunner", "load_model")[0] == "self"


@pytest.mark.cell("engine", "SGLang in verl and slime: runner of 0.5.10 to 0.5.23", CONTRACT)
@pytest.mark.parametrize("version", SGLANG)
def test_sglang(tmp_path: Path, version: str) -> None:
    batch = "sglang/srt/model_executor/forward_batch_info.py"
    root = published.files(f"sglang=={version}", [path(hooks.SGLANG), batch], tmp_path)
    runner = Source(root / path(hooks.SGLANG))
    assert runner.arguments(sglang.CLASS, "forward")[:2] == ["self", "forward_batch"]
    assert runner.arguments(sglang.CLASS, "load_model")[0] == "self"
    assert "self.is_draft_worker = " in runner.text and "self.model = " in runner.text
    forward = Source(root / batch)
    assert forward.fields("ForwardBatch") >= {"rids", "forward_mode", "input_ids", "seq_lens_sum"}
    for method in ("is_decode", "is_idle"):
        assert forward.arguments("ForwardMode", method) == ["self"]
    assert "rids=[req.rid for req in batch.reqs]" in forward.text


@pytest.mark.cell("engine", "verl's servers of 0.7.1, 0.8.0, 0.9.0, 0.9.1", CONTRACT)
@pytest.mark.parametrize("version", versions.KNOWN)
def test_verls_servers(tmp_path: Path, version: str) -> None:
    servers = {
        "verl/workers/rollout/vllm_rollout/vllm_async_server.py": "vLLMHttpServer",
        "verl/workers/rollout/sglang_rollout/async_sglang_server.py": "SGLangHttpServer",
    }
    root = published.files(f"verl=={version}", list(servers), tmp_path)
    for name, cls in servers.items():
        server = Source(root / name)
        assert server.is_coroutine(cls, "launch_server") and server.is_coroutine(cls, "generate")
        arguments = server.arguments(cls, "generate")
        assert {"prompt_ids", "request_id"} <= set(arguments)
        assert "replica_rank" in server.arguments(cls, "__init__")
        assert "self.replica_rank = replica_rank" in server.text
        assert "token_ids=" in server.text  # of the TokenOutput that it answers
        assert f"ray.remote({cls})" in server.text  # at its start, not when it is imported
