"""Are the parameters of Megatron's fused projections those of the projections, in any part?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from torch import Tensor, nn

from rlprobe import sketch
from rlprobe.capture import megatron_grads
from rlprobe.capture.engine_parameters import EngineParameters
from rlprobe.capture.fused_parameters import FusedParameters
from rlprobe.capture.parameters import Held
from rlprobe.logical import fused

GROUPS, QUERIES, EACH, INNER = 4, 2, 3, 5
ROWS = {"q_proj": GROUPS * QUERIES * EACH, "k_proj": GROUPS * EACH, "v_proj": GROUPS * EACH}
WHOLE = {
    name: torch.randn(rows, INNER, generator=torch.Generator().manual_seed(seed + 7))
    for seed, (name, rows) in enumerate(ROWS.items())
}
GATED = {
    name: torch.randn(8, INNER, generator=torch.Generator().manual_seed(seed))
    for seed, name in enumerate(("gate_proj", "up_proj"))
}
QKV, FC1 = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"


class GPTModel(nn.Module):
    config = type("Config", (), {"gated_linear_unit": True, "num_attention_heads": GROUPS * QUERIES,
                                 "num_query_groups": GROUPS})  # fmt: skip


GPTModel.__module__ = "megatron.core.models.gpt"


def of_rank(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """What a rank holds of both fused weights, as Megatron lays them out."""
    rows = []
    for group in range(GROUPS):
        for name, heads in (("q_proj", QUERIES), ("k_proj", 1), ("v_proj", 1)):
            first = group * heads * EACH
            rows.append(WHOLE[name][first : first + heads * EACH])
    # of fewer groups than ranks a rank has part of one, whatever heads that cuts
    own = torch.cat(rows).chunk(size)[rank]
    n = 8 // size
    halves = [GATED[name][n * rank : n * (rank + 1)] for name in ("gate_proj", "up_proj")]
    return own, torch.cat(halves)


Make = Callable[[int, int], FusedParameters]


@pytest.fixture
def projections(monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(rank: int, size: int) -> FusedParameters:
        found = {"tp": size, "tp_rank": rank}
        monkeypatch.setattr("rlprobe.capture.fused_parameters.layout", lambda models: found)
        return FusedParameters([GPTModel()])

    return make


def held(name: str, local: Tensor, size: int, **where: Any) -> Held:
    shape = (local.shape[0] * size, INNER)
    return Held(name, nn.Parameter(local), local, shape, complete=size == 1, **where)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_parts_of_all_ranks_are_the_projections(projections: Make, size: int) -> None:
    found: dict[str, list[Tensor]] = {}
    sketches: dict[str, list[Tensor]] = {}
    for rank in range(size):
        for name, local in zip((QKV, FC1), of_rank(rank, size), strict=True):
            for item, tensor in projections(rank, size).apart(held(name, local, size), local):
                part = item.name.split(".")[-2]
                assert item.shape == ({**WHOLE, **GATED}[part].shape)
                found.setdefault(part, []).append(tensor)
                made = item.sketch_of(tensor)
                assert made is not None
                sketches.setdefault(part, []).append(made)
    assert found.keys() == {*WHOLE, *GATED}
    for part, whole in {**WHOLE, **GATED}.items():
        assert torch.equal(torch.cat(found[part]), whole)
        total = torch.stack(sketches[part]).sum(0).numpy()
        assert np.allclose(total, sketch.sketch(whole.numpy()), atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("cuts", [(0, 37, 240), (0, 120, 240), (0, 1, 110, 239, 240)])
def test_stretches_of_a_distributed_optimizer_add_up(
    projections: Make, size: int, cuts: tuple[int, ...]
) -> None:
    totals = {part: np.zeros(61) for part in ROWS}
    counts = dict.fromkeys(ROWS, 0)
    for rank in range(size):
        local, _ = of_rank(rank, size)
        flat = local.reshape(-1)
        for begin, end in itertools.pairwise(min(cut, flat.numel()) for cut in cuts):
            item = Held(QKV, nn.Parameter(local), flat[begin:end], (local.shape[0] * size, INNER),
                        None, rank * flat.numel() + begin, False)  # fmt: skip
            for part, tensor in projections(rank, size).apart(item, flat[begin:end]):
                if part.name == QKV:
                    assert not tensor.numel()
                    continue
                name = part.name.split(".")[-2]
                made = part.sketch_of(tensor)
                assert made is not None and part.offsets() is not None
                totals[name] += made.numpy()
                counts[name] += tensor.numel()
    for name, whole in WHOLE.items():
        assert counts[name] == whole.numel()
        assert np.allclose(totals[name], sketch.sketch(whole.numpy()), atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("cuts", [(0, 40), (0, 7, 40), (0, 1, 13, 39, 40)])
def test_stretches_of_gate_and_up_add_up(
    projections: Make, size: int, cuts: tuple[int, ...]
) -> None:
    """A rank has rows of both halves; its distributed optimizer owns a stretch of these."""
    totals = {part: np.zeros(61) for part in GATED}
    counts = dict.fromkeys(GATED, 0)
    for rank in range(size):
        _, local = of_rank(rank, size)
        n = 8 // size
        whole = Held(FC1, nn.Parameter(local), local, (16, INNER), None, None, False,
                     ((rank * n, n), (8 + rank * n, n)))  # fmt: skip
        flat = local.reshape(-1)
        for begin, end in itertools.pairwise(sorted({min(cut, flat.numel()) for cut in cuts})):
            own = megatron_grads._stretch(whole, flat[begin:end], begin)
            for part, tensor in projections(rank, size).apart(own, flat[begin:end]):
                made, name = part.sketch_of(tensor), part.name.split(".")[-2]
                assert made is not None and part.offsets() is not None
                totals[name] += made.numpy()
                counts[name] += tensor.numel()
    for name, values in GATED.items():
        assert counts[name] == values.numel()
        assert np.allclose(totals[name], sketch.sketch(values.numpy()), atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"],
)
def test_what_is_not_fused_or_not_known_stays_as_it_is(projections: Make, name: str) -> None:
    local = torch.randn(6, INNER)
    item = held(name, local, 1)
    assert list(projections(0, 1).apart(item, local)) == [(item, local)]


def test_outside_megatron_nothing_is_divided() -> None:
    local, _ = of_rank(0, 1)
    item = held(QKV, local, 1)
    assert list(FusedParameters([nn.Linear(2, 2)]).apart(item, local)) == [(item, local)]


def test_a_stretch_of_unknown_place_stays_as_it_is(projections: Make) -> None:
    local, _ = of_rank(0, 1)
    flat = local.reshape(-1)[:50]
    item = Held(QKV, nn.Parameter(local), flat, (local.shape[0], INNER), complete=False)
    assert list(projections(0, 1).apart(item, flat)) == [(item, flat)]


def test_rows_are_runs() -> None:
    assert fused.runs([0, 1, 2, 5, 6, 9]) == [(0, 3), (5, 2), (9, 1)]
    assert fused.runs([]) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_experts_projections_are_apart_where_ranks_divide_it_as_others(
    ranks: int, projections: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlprobe.capture.fused_parameters.expert_tensor", lambda: (ranks, 0))
    local = torch.randn(6, INNER)
    item = held("model.layers.0.mlp.experts.3.gate_up_proj.weight", local, 1)
    found = [(part.name, part.shape) for part, _ in projections(0, 1).apart(item, local)]
    expert = "model.layers.0.mlp.experts.3"
    if ranks == 1:
        assert found == [(f"{expert}.gate_proj.weight", (3, INNER)),
                         (f"{expert}.up_proj.weight", (3, INNER))]  # fmt: skip
    else:
        assert found == [(item.name, item.shape)]


class Stack(nn.Module):
    """A layer's experts as transformers has them."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.gate_up_proj = nn.Parameter(torch.randn(4, 6, INNER))
        self.down_proj = nn.Parameter(torch.randn(4, INNER, 3))


class Stacked(nn.Module):
    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.experts = Stack(transposed)


def test_stacked_experts_are_apart_where_that_is_asked_for() -> None:
    model = Stacked()
    every = dict(_apart_of(model))
    assert len(every) == 4 * 3
    stack = model.experts
    assert torch.equal(every["experts.2.up_proj.weight"], stack.gate_up_proj[2, 3:])
    assert torch.equal(every["experts.3.down_proj.weight"], stack.down_proj[3])
    assert len(list(_apart_of(model, by_expert=False))) == 2
    assert len(list(_apart_of(Stacked(transposed=True)))) == 2


@pytest.mark.parametrize("kind", ["slices", "stretches"])
def test_shards_of_stacked_experts_add_up(kind: str) -> None:
    """Their sketches, of two ranks, to each expert's; no rank has the other's."""
    model = Stacked()
    projections, whole = FusedParameters([model], by_expert=True), dict(_apart_of(model))
    sums: dict[str, Tensor] = {}
    weight = model.experts.gate_up_proj.detach()
    for rank in (0, 1):
        if kind == "slices":
            local = weight[3 * rank : 3 * rank + 3]
            where: dict[str, Any] = {"cut": (0, 3 * rank)}
        else:
            cut = 17  # within an expert, and within a part of it
            local = weight.reshape(-1)[cut:] if rank else weight.reshape(-1)[:cut]
            where = {"start": cut * rank}
        item = Held("experts.gate_up_proj", model.experts.gate_up_proj, local, (4, 6, INNER),
                    complete=False, **where)  # fmt: skip
        for part, own in projections.apart(item, local):
            found = part.sketch_of(own)
            assert found is not None
            sums[part.name] = sums.get(part.name, torch.zeros_like(found)) + found
    assert len(sums) == 8
    for name, found in sums.items():
        assert np.allclose(found, sketch.sketch(whole[name].numpy()), atol=1e-5), name


def _apart_of(model: nn.Module, by_expert: bool = True) -> list[tuple[str, Tensor]]:
    projections = FusedParameters([model], by_expert)
    return [
        (part.name, own.detach())
        for name, parameter in model.named_parameters()
        for part, own in projections.apart(
            Held(name, parameter, parameter.detach(), tuple(parameter.shape)), parameter.detach()
        )
    ]


class VocabParallelEmbedding(nn.Module):
    """Of Megatron; vLLM has a class of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, INNER))


def test_megatrons_embedding_is_not_taken_for_an_engines() -> None:
    model = GPTModel()
    model.embedding = VocabParallelEmbedding()
    weight = model.embedding.weight
    item = Held(
        "model.embed_tokens.weight", weight, weight.detach(), (8, INNER), (0, 4), None, False
    )
    found = list(EngineParameters([model]).apart(item, item.local))
    assert found == [(item, item.local)]
