"""States of Megatron's optimizers: main parameters, whole or this rank's stretch, and their Adam.

The optimizers here have the attributes of megatron-core 0.16's that matter, around torch's own
AdamW; a real one is trained with in tests/e2e/test_rejoin_megatron.py.
"""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch import Tensor, nn  # noqa: E402
from torch.optim import AdamW  # noqa: E402

from rlprobe.capture.state.join import join  # noqa: E402
from rlprobe.capture.state.keep import keep  # noqa: E402
from rlprobe.errors import ReplayError  # noqa: E402


class Model(nn.Module):
    def __init__(self, dtype: Any = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 4, bias=False, dtype=dtype)
        self.second = nn.Linear(4, 2, bias=False, dtype=dtype)


class Copies:
    """fp32 copies of half-precision parameters, without a distributed optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.models = list(model.parameters())
        self.mains = self.made()
        self.optimizer: Any = AdamW([{"params": self.mains}], lr=0.1)

    def made(self) -> list[Tensor]:
        self.float16_groups = [self.models]
        self.fp32_from_float16_groups = [[p.detach().float().clone() for p in self.models]]
        return self.fp32_from_float16_groups[0]

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        return True

    def train(self, steps: int, seed: int) -> None:
        """Steps with gradients of a seed, the same for whoever owns an element."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            for number, model in enumerate(self.models):
                whole = torch.randn(model.shape, generator=generator)
                self.mains[number].grad = self.owned(number, whole)
            self.optimizer.step()
            for number, model in enumerate(self.models):
                self.back(number, model)

    def owned(self, number: int, whole: Tensor) -> Tensor:
        return whole

    def back(self, number: int, model: Tensor) -> None:
        model.data.copy_(self.mains[number])


class Shards(Copies):
    """A rank's part of a distributed optimizer of two."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        super().__init__(model)

    def made(self) -> list[Tensor]:
        self.ranges = {}
        for parameter in self.models:
            half = parameter.numel() // 2
            begin = self.rank * half
            self.ranges[id(parameter)] = types.SimpleNamespace(start=begin, end=begin + half)
        self.model_float16_groups = [self.models]
        flat = [self.owned(n, p.detach().float()).clone() for n, p in enumerate(self.models)]
        self.shard_fp32_from_float16_groups = [flat]
        return flat

    def _get_model_param_range_map(self, parameter: Tensor) -> dict[str, Any]:
        return {"param": self.ranges[id(parameter)]}

    def owned(self, number: int, whole: Tensor) -> Tensor:
        place = self.ranges[id(self.models[number])]
        return whole.reshape(-1)[place.start : place.end]

    def back(self, number: int, model: Tensor) -> None:
        place = self.ranges[id(model)]
        model.data.view(-1)[place.start : place.end] = self.mains[number].to(model.dtype)


def kept(directory: Path, model: nn.Module, optimizer: Any, rank: int = 0, world: int = 1) -> None:
    keep(
        directory, role="actor", rank=rank, world_size=world, step=1, models=[model],
        optimizer=optimizer,
    )  # fmt: skip


def joined(directory: Path, model: nn.Module, optimizer: Any, rank: int = 0) -> dict[str, Any]:
    return join(directory, role="actor", rank=rank, models=[model], optimizer=optimizer)


def copies(steps: int, seed: int) -> tuple[Model, Copies]:
    model = Model()
    optimizer = Copies(model)
    optimizer.train(steps, seed)
    return model, optimizer


def same(one: Copies, other: Copies) -> bool:
    pairs = zip(one.mains, other.mains, strict=True)
    states = [(one.optimizer.state[a], other.optimizer.state[b], a, b) for a, b in pairs]
    return all(
        torch.equal(a, b)
        and float(left["step"]) == float(right["step"])
        and all(torch.equal(left[key], right[key]) for key in ("exp_avg", "exp_avg_sq"))
        for left, right, a, b in states
    )


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_main_parameters_and_their_state_are_taken_over(tmp_path: Path, steps: int) -> None:
    model, optimizer = copies(3, seed=1)
    kept(tmp_path, model, optimizer)
    other, own = copies(steps, seed=2)
    done = joined(tmp_path, other, own)
    assert (done["parameters"], done["states"], done["rounded"]) == (2, 2, [])
    assert same(optimizer, own)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    optimizer.train(2, seed=3)
    own.train(2, seed=3)
    assert same(optimizer, own)


def shards(root: Path, steps: int, seed: int) -> list[tuple[Model, Shards]]:
    found = []
    for rank in range(2):
        model = Model()
        optimizer = Shards(model, rank)
        optimizer.train(steps, seed)
        kept(root, model, optimizer, rank, 2)
        found.append((model, optimizer))
    return found


def test_a_distributed_optimizers_parts_make_a_whole_and_back(tmp_path: Path) -> None:
    shards(tmp_path / "two", 3, seed=1)
    parts = json.loads((tmp_path / "two/actor-rank1.json").read_text())["parameters"]
    assert parts["first.weight"]["offset"] == {"element": 12}
    whole, own = copies(1, seed=2)
    joined(tmp_path / "two", whole, own)
    model, reference = copies(3, seed=1)
    assert same(reference, own)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )
    kept(tmp_path / "one", whole, own)
    for rank in range(2):
        part = Model()
        optimizer = Shards(part, rank)
        joined(tmp_path / "one", part, optimizer, rank)
        for number, main in enumerate(reference.mains):
            assert torch.equal(optimizer.mains[number], optimizer.owned(number, main))


def test_fsdps_fp32_parameters_are_megatrons_mains_and_the_other_way_round(tmp_path: Path) -> None:
    model, optimizer = copies(3, seed=1)
    kept(tmp_path / "megatron", model, optimizer)
    plain = Model(torch.float32)
    adam = AdamW(plain.parameters(), lr=0.1)
    done = joined(tmp_path / "megatron", plain, adam)
    assert done["rounded"] == [] and done["optimizer"] == "Copies(AdamW)"
    for main, parameter in zip(optimizer.mains, plain.parameters(), strict=True):
        assert torch.equal(main, parameter)
        assert torch.equal(
            optimizer.optimizer.state[main]["exp_avg"], adam.state[parameter]["exp_avg"]
        )
    kept(tmp_path / "plain", plain, adam)
    other, own = copies(1, seed=9)
    joined(tmp_path / "plain", other, own)
    assert same(optimizer, own)


def test_steps_that_are_counted_for_a_group_are_taken_over(tmp_path: Path) -> None:
    """Apex's, Transformer Engine's and MindSpeed's fused Adams."""

    def fused(optimizer: Copies) -> None:
        for state in optimizer.optimizer.state.values():
            state.pop("step", None)
        optimizer.optimizer.param_groups[0]["step"] = 7

    _, optimizer = one = copies(3, seed=1)
    fused(optimizer)
    kept(tmp_path / "group", *one)
    other, own = copies(2, seed=2)
    fused(own)
    own.optimizer.param_groups[0]["step"] = 2
    joined(tmp_path / "group", other, own)
    assert own.optimizer.param_groups[0]["step"] == 7
    assert all("step" not in state for state in own.optimizer.state.values())
    single, its = copies(2, seed=2)
    joined(tmp_path / "group", single, its)
    assert {float(state["step"]) for state in its.optimizer.state.values()} == {7.0}


def test_a_part_that_nobody_kept_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, 1, seed=1)
    path = tmp_path / "actor-rank1.json"
    raw = json.loads(path.read_text())
    raw["parameters"]["first.weight"]["offset"] = {"element": 0}
    path.write_text(json.dumps(raw))
    model, optimizer = copies(1, seed=2)
    with pytest.raises(ReplayError, match="12 of 24 elements were kept by no process"):
        joined(tmp_path, model, optimizer)
