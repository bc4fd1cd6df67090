"""Does the light engine change anything it watches? Outputs, gradients and weights, bit for bit."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils import checkpoint  # noqa: E402

from tests.unit.capture_helpers import (  # noqa: E402
    UPDATE,
    Block,
    Tiny,
    dump,
    hooks_of,
    make,
    recorder,
    tokens,
)

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Answer:
    hidden: Tensor
    nothing: None = None


class InPlace(nn.Module):
    """ReLU in place, and a module's output changed in place by its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.linear = nn.Linear(24, 24)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(24, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.relu(self.linear(self.embed(ids)))
        y = self.linear(x)
        y += x
        y[:, 0].mul_(2.0)
        return self.head(y)


class Containers(nn.Module):
    """Modules that return dicts, dataclasses, named tuples, tuples, views and nothing."""

    class Part(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.weight = nn.Parameter(torch.randn(24))

        def forward(self, x: Tensor, *, scale: Tensor | None = None, name: str = "a") -> Any:
            y = x * self.weight if scale is None else x * self.weight * scale
            if self.kind == "dict":
                return OrderedDict(hidden=y, other=None)
            if self.kind == "dataclass":
                return Answer(y)
            if self.kind == "named":
                return Pair(y, [y.sum()])
            if self.kind == "tuple":
                return y, y.mean(), "text", 3
            if self.kind == "view":
                return y.transpose(0, 1)
            if self.kind == "nothing":
                return None
            return y

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        kinds = ("dict", "dataclass", "named", "tuple", "view", "nothing", "same")
        self.parts = nn.ModuleDict({kind: self.Part(kind) for kind in kinds})
        self.identity = nn.Identity()
        self.head = nn.Linear(24, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.parts["dict"](x, scale=x.detach().abs())["hidden"]
        x = self.parts["dataclass"](x).hidden
        pair = self.parts["named"](x)
        x = pair.first + pair.second[0]
        x, mean, _, _ = self.parts["tuple"](x, name="b")
        self.parts["nothing"](x)
        x = self.parts["view"](x + mean).transpose(0, 1)
        x = self.identity(self.parts["same"](x))
        return self.head(x)


class Checkpointed(Tiny):
    """Activation checkpointing of both kinds, and the selective one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, ids: Tensor) -> Tensor:
        saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        contexts = partial(checkpoint.create_selective_checkpoint_contexts, saved)
        x = self.embed(ids)
        for layer in self.layers:
            if self.kind == "selective":
                x = checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            else:
                x = checkpoint.checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


class Frozen(Tiny):
    """Frozen embeddings and a frozen block, as when adapters train."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.embed, self.layers[0]):
            for parameter in part.parameters():
                parameter.requires_grad_(False)


class Repeated(Tiny):
    """One block applied three times, and a module known under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[1]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = self.layers[0](x)
        return self.head(self.again(x))


class Recovering(Tiny):
    """A module that fails and whose caller goes on without it."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            self.inner(x)
            raise ValueError("no kernel for this")

    def __init__(self) -> None:
        super().__init__()
        self.fast = self.Failing()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        try:
            x = self.fast(x)
        except ValueError:
            x = self.layers[0](x)
        return self.head(self.layers[1](x))


class Half(Tiny):
    """bfloat16 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Tiny,
    "tied": lambda: Tiny(tied=True),
    "in place": InPlace,
    "containers": Containers,
    "reentrant checkpoint": lambda: Checkpointed("reentrant"),
    "checkpoint": lambda: Checkpointed("plain"),
    "selective checkpoint": lambda: Checkpointed("selective"),
    "frozen": Frozen,
    "repeated": Repeated,
    "recovering": Recovering,
    "bfloat16": Half,
}


def train(model: nn.Module, root: Path | None, passes: int = 2) -> dict[str, Tensor]:
    """Two micro-batches and an optimizer step, captured below ``root`` or not at all."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: dict[str, Tensor] = {}

    def body(scope: Any = None) -> None:
        for index in range(passes):
            if scope is not None:
                scope.micro_step(index)
            output = model(tokens())
            loss = nn.functional.cross_entropy(output.float().flatten(0, 1), tokens().flatten())
            loss.backward()
            found[f"output {index}"] = output.detach().clone()
            found[f"loss {index}"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"grad {name}"] = parameter.grad.clone()
        optimizer.step()

    if root is None:
        body()
    else:
        with recorder(root).stage(UPDATE, 0, 1, model, optimizer=optimizer) as scope:
            body(scope)
            scope.gradients("grad")
    for name, parameter in model.named_parameters():
        found[f"weight {name}"] = parameter.detach().clone()
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_training_is_bitwise_the_same_with_and_without_capture(name: str, tmp_path: Path) -> None:
    without = train(make(MODELS[name]), None)
    model = make(MODELS[name])
    watched = train(model, tmp_path)
    assert without.keys() == watched.keys()
    different = [key for key in without if not torch.equal(without[key], watched[key])]
    assert different == []
    assert any(".backward." in key for key in dump(tmp_path)), "nothing was watched"
    assert hooks_of(model) == []


def test_inference_without_gradients_is_unchanged_and_recorded(tmp_path: Path) -> None:
    model = make()
    with torch.no_grad():
        expected = model(tokens())
        with recorder(tmp_path).stage("actor_compute_log_prob", 0, 1, model):
            found = model(tokens())
    assert torch.equal(expected, found)
    data = dump(tmp_path, "actor_compute_log_prob")
    assert "Module.head.Linear.forward.0" in data
    assert not any("backward" in name for name in data)


def test_inference_mode_tensors_are_recorded(tmp_path: Path) -> None:
    model = make()
    stage = recorder(tmp_path).stage("actor_compute_log_prob", 0, 1, model)
    with torch.inference_mode(), stage:
        model(tokens())
    leaf = dump(tmp_path, "actor_compute_log_prob")["Module.head.Linear.forward.0"]["output"][0]
    assert leaf["Norm"] > 0


def test_a_graph_that_outlives_the_stage_is_no_longer_watched(tmp_path: Path) -> None:
    model = make()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        loss = model(tokens()).sum()
    loss.backward()
    assert not any("backward" in name for name in dump(tmp_path))


def test_a_second_walk_of_the_graph_changes_no_gradient(tmp_path: Path) -> None:
    def twice(model: nn.Module) -> Tensor:
        loss = model(tokens()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        gradient = model.get_parameter("layers.0.up.weight").grad
        assert gradient is not None
        return gradient

    expected = twice(make())
    model = make()
    with recorder(tmp_path).stage(UPDATE, 0, 1, model):
        found = twice(model)
    assert torch.equal(expected, found)


def test_the_random_stream_is_not_touched(tmp_path: Path) -> None:
    def draw(root: Path | None) -> Tensor:
        torch.manual_seed(3)
        model = make(lambda: nn.Sequential(Block(24), nn.Dropout(0.5), Block(24)))
        x = torch.ones(2, 3, 24, requires_grad=True)
        if root is None:
            model(x).sum().backward()
        else:
            with recorder(root).stage(UPDATE, 0, 1, model):
                model(x).sum().backward()
        return torch.rand(4)

    assert torch.equal(draw(None), draw(tmp_path))
