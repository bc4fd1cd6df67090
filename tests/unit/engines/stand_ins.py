"""Stand-ins of engines' processes: a session handed over, runners, and what was dumped."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlprobe.frameworks.engines import handover, marks, vllm
from tests.unit.capture_helpers import Tiny, make, session

GENERATE = "actor_generate_sequences"
NS = types.SimpleNamespace


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
