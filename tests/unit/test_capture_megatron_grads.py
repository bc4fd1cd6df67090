"""Which gradients does a Megatron optimizer step with, and what part of which parameter are they?

The optimizers here have the attributes of megatron-core 0.16's that matter; real ones are trained
with in tests/e2e/test_megatron.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlprobe.capture import megatron_grads
from rlprobe.capture.light.sketches import sketch
from rlprobe.capture.updates import group_norms
from rlprobe.frameworks.slime import running, updates
from rlprobe.frameworks.stepping import stepping
from tests.unit.capture_helpers import dump, recorder


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(4, 2, bias=False, dtype=torch.bfloat16)
        for parameter in self.parameters():
            parameter.main_grad = torch.randn(parameter.shape)


class Optimizer:
    """Prepares, clips to a norm of 1 and steps, as Megatron's ``step`` does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer: Any = types.SimpleNamespace(param_groups=[{"params": self.mains()}])

    def mains(self) -> list[Tensor]:
        raise NotImplementedError

    def fill(self) -> None:
        raise NotImplementedError

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        mains = self.optimizer.param_groups[0]["params"]
        return [main.grad for main in mains if main.grad is not None]

    def prepare_grads(self) -> bool:
        self.fill()
        return False

    def step_with_ready_grads(self) -> bool:
        return True

    def step(self) -> float:
        self.prepare_grads()
        found = self.get_main_grads_for_grad_norm()
        norm = float(torch.stack([g.square().sum() for g in found]).sum().sqrt())
        for gradient in found:
            gradient.mul_(1 / norm)
        self.step_with_ready_grads()
        return norm


class Copies(Optimizer):
    """fp32 copies of half-precision parameters, without a distributed optimizer."""

    def mains(self) -> list[Tensor]:
        self.float16_groups = [list(self.model.parameters())]
        self.fp32_from_float16_groups = [[p.detach().float() for p in self.model.parameters()]]
        return self.fp32_from_float16_groups[0]

    def fill(self) -> None:
        for parameter, main in zip(self.model.parameters(), self.mains_there(), strict=True):
            main.grad = parameter.main_grad.clone()

    def mains_there(self) -> list[Tensor]:
        return self.optimizer.param_groups[0]["params"]


class Shards(Optimizer):
    """A distributed optimizer's second rank of two: half of the first parameter, all the second."""

    def mains(self) -> list[Tensor]:
        self.ranges = {
            id(self.model.first.weight): types.SimpleNamespace(start=12, end=24),
            id(self.model.second.weight): types.SimpleNamespace(start=0, end=8),
        }
        models = list(self.model.parameters())
        self.model_float16_groups = [models]
        # what the copies are made of is kept beside them
        self.shard_float16_groups = [
            [p.detach().view(-1)[self.ranges[id(p)].start : self.ranges[id(p)].end] for p in models]
        ]
        self.shard_fp32_from_float16_groups = [[p.float() for p in self.shard_float16_groups[0]]]
        return self.shard_fp32_from_float16_groups[0]

    def _get_model_param_range_map(self, parameter: Tensor) -> dict[str, Any]:
        return {"param": self.ranges[id(parameter)]}

    def fill(self) -> None:
        for parameter, main in zip(
            self.model.parameters(), self.shard_fp32_from_float16_groups[0], strict=True
        ):
            owned = self.ranges[id(parameter)]
            main.grad = parameter.main_grad.view(-1)[owned.start : owned.end].clone()


@pytest.mark.parametrize("kind", [Copies, Shards])
def test_before_gradients_are_prepared_there_are_none(kind: type[Optimizer]) -> None:
    model = Model()
    optimizer = kind(model)
    assert list(megatron_grads.gradients([model], optimizer)) == []
    assert group_norms(optimizer).tolist() == [0.0]
    optimizer.prepare_grads()
    assert len(list(megatron_grads.gradients([model], optimizer))) == 2
    assert group_norms(optimizer)[0] > 0


def test_a_stretch_says_where_it_lies_and_its_sketch_is_the_wholes_part() -> None:
    model = Model()
    optimizer = Shards(model)
    optimizer.prepare_grads()
    first, second = megatron_grads.gradients([model], optimizer)
    whole = model.first.weight.main_grad
    assert (first[0].name, first[0].shape, first[0].offsets()) == (
        "first.weight", (4, 6), {"element": 12},
    )  # fmt: skip
    assert torch.equal(first[1], whole.view(-1)[12:])
    others = sketch(whole.view(-1)[:12], 0)
    assert torch.allclose(first[0].sketch_of(first[1]) + others, sketch(whole), atol=1e-4)
    assert second[0].complete and second[1].shape == (2, 4)


def test_a_stretch_of_a_slice_of_columns_has_no_place() -> None:
    model = Model()
    optimizer = Shards(model)
    optimizer.prepare_grads()
    (whole, gradient), _ = megatron_grads.gradients([model], optimizer)
    held = megatron_grads._stretch(_cut(whole, (1, 6)), gradient, 12)
    assert held.offsets() is None and held.sketch_of(gradient) is None
    rows = megatron_grads._stretch(_cut(whole, (0, 4)), gradient, 12)
    assert rows.offsets() == {"element": 4 * 6 + 12}


def _cut(item: Any, cut: tuple[int, int]) -> Any:
    shape = (8, 6) if cut[0] == 0 else (4, 12)
    return dataclasses.replace(item, shape=shape, cut=cut, start=None, complete=False)


def seen(optimizer: Any, scope: Any) -> Any:
    """As verl's engine is watched."""

    def prepared() -> None:
        scope.gradients("grad_reduced", optimizer)
        scope.gradient_norms(optimizer)

    return stepping(optimizer, prepared, lambda: scope.gradients("grad_clipped", optimizer))


@pytest.mark.parametrize("kind", [Copies, Shards])
@pytest.mark.parametrize("ranks", [1, 2])
def test_slime_records_what_its_optimizer_steps_on_one_rank_and_on_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Optimizer], ranks: int
) -> None:
    monkeypatch.setattr("rlprobe.capture.megatron_layout.data_parallel_size", lambda: ranks)
    model = Model()
    optimizer = kind(model)
    optimizer.prepare_grads = other = optimizer.prepare_grads  # type: ignore[method-assign]
    capturing = recorder(tmp_path, key_data=True)
    with capturing.stage("actor_update", 0, 1, model, optimizer=optimizer) as scope:
        monkeypatch.setattr(running, "scope", lambda: scope)
        with updates.watched(optimizer):
            norm = optimizer.step()
    assert vars(optimizer)["prepare_grads"] is other, "somebody else's wrapper is there again"
    data = dump(tmp_path, name="debug.json")
    reduced = [data[f"{name}.grad_reduced.0.debug"]["Norm"] for name in _NAMES]
    clipped = [data[f"{name}.grad_clipped.0.debug"]["Norm"] for name in _NAMES]
    assert np.hypot(*reduced) == pytest.approx(norm, rel=1e-6) and norm > 1
    assert np.hypot(*clipped) == pytest.approx(1.0, rel=1e-6)
    place = tmp_path / "dump/data/actor_grad_norm/step0/rank0/micro_step0/actor_grad_norm.npy"
    assert np.load(place) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("kind", [Copies, Shards])
def test_norms_and_gradients_of_a_step_are_those_that_it_uses(
    tmp_path: Path, kind: type[Optimizer]
) -> None:
    model = Model()
    optimizer = kind(model)
    capturing = recorder(tmp_path, key_data=True)
    with capturing.stage("actor_update", 0, 1, model, optimizer=optimizer) as scope:
        with seen(optimizer, scope):
            norm = optimizer.step()
        scope.total_norm(norm)
    assert "prepare_grads" not in vars(optimizer), "the optimizer is left as it was"
    data = dump(tmp_path, name="debug.json")
    reduced = [data[f"{name}.grad_reduced.0.debug"]["Norm"] for name in _NAMES]
    clipped = [data[f"{name}.grad_clipped.0.debug"]["Norm"] for name in _NAMES]
    assert np.hypot(*reduced) == pytest.approx(norm, rel=1e-6) and norm > 1
    assert np.hypot(*clipped) == pytest.approx(1.0, rel=1e-6)
    for name in ("actor_grad_norm", "actor_total_grad_norm"):
        place = tmp_path / f"dump/data/{name}/step0/rank0/micro_step0/{name}.npy"
        assert np.load(place) == pytest.approx(norm, rel=1e-6)


_RUN = Path(__file__).with_name("capture_megatron_grads_run.py")
_DIVIDED = Path(__file__).with_name("capture_divided_norms_run.py")
_NAMES = ("first.weight", "second.weight")


def test_a_failed_step_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = Model()
    optimizer = Copies(model)
    scope = types.SimpleNamespace()
    with pytest.raises(ZeroDivisionError), seen(optimizer, scope):
        raise ZeroDivisionError
    assert "step_with_ready_grads" not in vars(optimizer)


@pytest.mark.slow
def test_every_gradient_of_megatrons_own_optimizers_is_found(tmp_path: Path) -> None:
    """With and without a distributed optimizer, in half precision (where the stretches that fp32
    copies were made of are kept beside them) and in fp32."""
    pytest.importorskip("megatron.core")
    command = [sys.executable, str(_RUN), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *every, slime, aware = json.loads(done.stdout.splitlines()[-1])
    assert len(every) == 4
    for found in every:
        assert [name.rpartition(".")[2] for name in found["names"]] == ["bias", "weight"] * 2, found
        assert found["dtypes"] == ["torch.float32"], found
        assert found["norm"] == pytest.approx(found["own"], rel=1e-5) and found["own"] > 0, found
        assert found["stepped"] == 4, found
        told = {name: group["settings"] for group in found["settings"] for name in group["names"]}
        assert sorted(told) == found["names"], found["settings"]
        assert all(own["lr"] == 1e-3 and len(own["betas"]) == 2 for own in told.values()), told
    # slime clips inside the step: norms of groups before, the optimizer's own once it has stepped
    for told in slime:
        kinds = ["grad_reduced", "groups", "grad_clipped", "settings", "total", "own"]
        assert [kind for kind, _ in told] == kinds, told
        reduced, groups, clipped, _, total, own = (number for _, number in told)
        assert groups == pytest.approx(reduced, rel=1e-6) and reduced > 1.0
        assert (total, clipped) == (own, pytest.approx(0.5, rel=1e-5))
        assert total == pytest.approx(reduced, rel=1e-6)
    # a precision-aware optimizer's gradients lie beside the parameters; its copies are its own, so
    # that a change is that of the model, where a small one is rounded away
    assert aware["names"] == every[0]["names"] and aware["stepped"] == 4, aware
    # Megatron adds bf16 up in bf16 here
    assert aware["norm"] == pytest.approx(aware["own"], rel=4e-3) and aware["own"] > 0, aware
    assert aware["squares"] ** 0.5 == pytest.approx(aware["norm"], rel=1e-5), aware
    assert aware["kept"] == [], aware
    assert sorted(aware["changes"]) == [f"{name}.change" for name in aware["names"]], aware
    assert set(aware["changes"].values()) == {0.0}, aware


@pytest.mark.slow
@pytest.mark.long
def test_norms_count_every_part_of_a_divided_weight_once_marked_or_not(tmp_path: Path) -> None:
    """Two tensor-parallel ranks of megatron-core, with and without a distributed optimizer, in both
    precisions. Where a model was not initialised, Megatron's own norm is short."""
    pytest.importorskip("megatron.core")
    commands = [[sys.executable, str(_DIVIDED), str(rank), str(tmp_path)] for rank in (0, 1)]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            for command in commands
        ]
        said = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][1][-2000:] + said[1][1][-2000:]
    every = zip(*(json.loads(out.splitlines()[-1]) for out, _ in said), strict=True)
    for first, second in every:
        divided = first["divided"]
        assert divided == ["back.weight", "out.bias", "out.weight", "table.weight"]
        parts = [second["norms"][name] for name in divided]
        whole = float(np.hypot.reduce([*first["norms"].values(), *parts]))
        assert float(np.hypot.reduce([*first["ours"], *second["ours"]])) == pytest.approx(whole)
        if first["marked"]:
            assert first["own"] == pytest.approx(whole)
        else:
            assert first["own"] < 0.9 * whole


def step(optimizer: Any, by: float) -> None:
    """Move every copy, and hand it on to the model, rounded."""
    parameters = list(optimizer.model.parameters())
    for parameter, main in zip(
        parameters, optimizer.optimizer.param_groups[0]["params"], strict=True
    ):
        main.add_(by)
        first = optimizer.ranges[id(parameter)].start if isinstance(optimizer, Shards) else 0
        parameter.data.view(-1)[first : first + main.numel()].copy_(main.view(-1))


def changes(tmp_path: Path, model: nn.Module, optimizer: Any, stepped: Any) -> dict[str, Any]:
    capturing = recorder(tmp_path, provenance=True)
    with capturing.stage("actor_update", 0, 1, model, optimizer=optimizer):
        stepped()
    return dump(tmp_path, name="debug.json")


@pytest.mark.parametrize("kind", [Copies, Shards])
def test_changes_are_read_off_the_copies_that_are_stepped(
    tmp_path: Path, kind: type[Optimizer]
) -> None:
    model = Model()
    optimizer = kind(model)
    small = 2.0**-20  # far less than a bf16 weight can show
    data = changes(tmp_path, model, optimizer, lambda: step(optimizer, small))
    found = data["first.weight.change.0.debug"]
    assert found["Max"] == pytest.approx(small, rel=0.01) and found["Min"] > 0
    assert found["shape"] == ([12] if kind is Shards else [4, 6])
    places = (tmp_path / "side/parts/gradients/actor-rank0.jsonl").read_text().splitlines()
    (first,) = (json.loads(line) for line in places if "first.weight" in line)
    assert first["kept"] == "torch.float32"
    assert first["offset"] == ({"element": 12} if kind is Shards else None)


@pytest.mark.parametrize("kind", [Copies, Shards])
def test_a_copy_that_is_not_handed_on_changes_nothing(
    tmp_path: Path, kind: type[Optimizer]
) -> None:
    """What a model computes with is what counts."""
    model = Model()
    optimizer = kind(model)

    def stepped() -> None:
        step(optimizer, 0.25)
        main = optimizer.optimizer.param_groups[0]["params"][1]
        main.add_(1.0)

    data = changes(tmp_path, model, optimizer, stepped)
    for name in _NAMES:
        assert data[f"{name}.change.0.debug"]["Max"] == pytest.approx(0.25, rel=0.01)


class Aware(Shards):
    """A precision-aware optimizer: it steps the model's own numbers, and keeps no copy here."""

    config = types.SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=True)

    def mains(self) -> list[Tensor]:
        super().mains()
        self.shard_fp32_from_float16_groups = [[None, None]]  # type: ignore[list-item]
        return self.shard_float16_groups[0]


def test_without_copies_changes_are_the_models(tmp_path: Path) -> None:
    model = Model()
    optimizer = Aware(model)
    data = changes(tmp_path, model, optimizer, lambda: model.first.weight.data.add_(1.0))
    assert data["first.weight.change.0.debug"]["shape"] == [4, 6]
    places = (tmp_path / "side/parts/gradients").rglob("*")
    assert not [path for path in places if path.stat().st_size], "nothing was copied"


def test_what_another_rank_steps_is_its_own_to_record(tmp_path: Path) -> None:
    model = Model()
    optimizer = Shards(model)
    # the copies are the optimizer's parameters, so that they are taken out of both
    del optimizer.model_float16_groups[0][1], optimizer.shard_fp32_from_float16_groups[0][1]
    frozen = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    model.register_parameter("frozen", frozen)
    data = changes(tmp_path, model, optimizer, lambda: model.first.weight.data.add_(1.0))
    assert {name.partition(".change")[0] for name in data} == {"first.weight", "frozen"}
