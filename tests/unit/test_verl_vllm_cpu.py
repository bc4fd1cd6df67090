"""The CPU's stand-in for vLLM's packed experts computes what the experts are."""

from __future__ import annotations

import os
import types
from typing import Any

import pytest

pytest.importorskip("verl")
import torch
from torch import Tensor

from rlprobe.errors import HookError, RunError
from rlprobe.frameworks.verl.cpu import vllm

TOKENS, WIDTH, INNER, EXPERTS, EACH = 9, 8, 6, 5, 2
DRAW = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


HIDDEN, GATE_UP, DOWN = (
    drawn(TOKENS, WIDTH), drawn(EXPERTS, 2 * INNER, WIDTH), drawn(EXPERTS, WIDTH, INNER)
)  # fmt: skip
WEIGHTS, IDS = drawn(TOKENS, EXPERTS).softmax(-1).topk(EACH)


def one_by_one(gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None) -> Tensor:
    found = torch.zeros(TOKENS, WIDTH)
    for token in range(TOKENS):
        for weight, expert in zip(WEIGHTS[token], IDS[token], strict=True):
            both = GATE_UP[expert] @ HIDDEN[token]
            both = both if gate_up_bias is None else both + gate_up_bias[expert]
            gate, up = both[:INNER], both[INNER:]
            made = DOWN[expert] @ (gate * torch.sigmoid(gate) * up)
            made = made if down_bias is None else made + down_bias[expert]
            found[token] += weight * made
    return found


@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_the_weighted_sum_of_each_tokens(biased: bool) -> None:
    first, second = (drawn(EXPERTS, 2 * INNER), drawn(EXPERTS, WIDTH)) if biased else (None, None)
    out = torch.full((TOKENS, WIDTH), 7.0)
    vllm.fused_experts(out, HIDDEN, GATE_UP, DOWN, first, second, WEIGHTS, IDS.int(), "silu", "vec")
    assert torch.allclose(out, one_by_one(first, second), atol=1e-5)


def test_an_unknown_activation_is_said() -> None:
    with pytest.raises(HookError, match="swigluoai: accepted: silu, gelu"):
        vllm.fused_experts(
            HIDDEN.clone(), HIDDEN, GATE_UP, DOWN, None, None, WEIGHTS, IDS, "swigluoai", "vec"
        )


def test_weights_stay_as_they_were_given() -> None:
    module: Any = types.ModuleType("cpu_moe")
    module.cpu_prepack_moe_weight = lambda weight, isa: weight.flip(0)
    module.cpu_fused_moe = lambda *args: None
    vllm.plain_experts(module)
    assert module.cpu_prepack_moe_weight(GATE_UP, "vec") is GATE_UP
    with pytest.raises(HookError, match="has no cpu_prepack_moe_weight"):
        vllm.plain_experts(types.ModuleType("another"))


def test_every_rank_and_worker_makes_the_same_name_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank sends its worker of the engine the weights, by a name of the job and the rank."""
    import ray

    from rlprobe.frameworks.verl.local import vllm_server

    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "")
    for name in ("get_runtime_context", "get_actor"):
        monkeypatch.setattr(ray, name, getattr(ray, name))
    monkeypatch.setattr(ray.util, "get_node_ip_address", ray.util.get_node_ip_address)
    vllm_server.stand_in_for_ray(2)
    assert os.environ["RAY_LOCAL_WORLD_SIZE"] == "2"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, ray.get_runtime_context().get_job_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode() == ray.get_runtime_context().get_job_id()


def test_ranks_that_are_no_workers_of_one_engine_are_refused() -> None:
    from omegaconf import OmegaConf

    from rlprobe.frameworks.verl.local import vllm_server

    config = OmegaConf.create(
        {
            "trainer": {"n_gpus_per_node": 2, "nnodes": 1},
            "actor_rollout_ref": {"rollout": {"tensor_model_parallel_size": 1}},
        }
    )
    with pytest.raises(RunError, match=r"found 2 ranks .*tensor_model_parallel_size=1; make them"):
        vllm_server.start(config)


def test_a_mapper_of_names_is_called_as_verl_calls_it() -> None:
    class Newer:
        def get_rename_mapper(self) -> str:
            return "renames"

    class Older:
        def get_unstacked_mapper(self) -> str:
            return "its own"

    for cls, found in ((Newer, "renames"), (Older, "its own")):
        module: Any = types.SimpleNamespace(WeightsMapper=cls)
        vllm.unstacked_names(module)
        assert module.WeightsMapper().get_unstacked_mapper() == found
    # before 0.25 there is neither, and verl asks for none
    vllm.unstacked_names(types.SimpleNamespace(WeightsMapper=type("Oldest", (), {})))  # type: ignore[arg-type]
