"""Operators of a suspect: recorded without effect, paired, and the first that differs named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.errors import DumpError  # noqa: E402
from rlprobe.refine import trace  # noqa: E402
from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.capture_helpers import rank_dir, tokens  # noqa: E402
from tests.unit.traced import (  # noqa: E402
    LAYER,
    NORM,
    RmsNorm,
    first,
    model,
    observed,
    of_masked,
    plain_loss,
    run,
    wrapped,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "module"),
    [("module", NORM), ("module", LAYER), ("outputs", None), ("update", None)],
)
def test_a_trace_has_no_effect_on_the_run(tmp_path: Path, kind: str, module: str | None) -> None:
    _, without = run(tmp_path / "plain", kind=None)
    found, weights = run(tmp_path / "traced", kind=kind, module=module)
    assert found is not None and len(found.operators) > 2
    assert all(torch.equal(without[name], weights[name]) for name in without)


def test_a_trace_has_every_operator_with_its_scalars_and_what_went_in_and_out(
    tmp_path: Path,
) -> None:
    found, _ = run(tmp_path)
    forward = [op for op in found.operators if op.direction == "forward"]
    names = [op.name for op in forward if op.name != "aten::detach"]
    assert names == ["aten::pow.Tensor_Scalar", "aten::mean.dim", "aten::add.Tensor",
                     "aten::rsqrt", "aten::mul.Tensor", "aten::mul.Tensor"]  # fmt: skip
    add = next(op for op in forward if op.name == "aten::add.Tensor")
    assert {a.name: a.scalar for a in add.arguments if not a.tensors} == {"other": 1e-6, "alpha": 1}
    assert add.site is not None and add.site.startswith("traced.py:")
    assert add.inputs[0].shape == [3, 7, 1] and add.inputs[0].dtype == "torch.float32"
    assert [v.origin for op in forward for v in op.inputs if v.origin] == ["input 0", "weight"]
    back = [op for op in found.operators if op.direction == "backward"]
    assert back and all(op.node is not None for op in back)
    rsqrt = next(op.n for op in forward if op.name == "aten::rsqrt")
    assert any(op.of == rsqrt for op in back)


def test_nothing_is_watched_elsewhere(tmp_path: Path) -> None:
    found, _ = run(tmp_path, module=LAYER)
    assert {op.name for op in found.operators if op.name.startswith("module::")} == {
        f"module::{LAYER}.{name}" for name in ("norm", "gate", "up", "down")
    }
    names = {op.name for op in found.operators}
    assert "aten::sigmoid" in names and "aten::sigmoid_backward" in names
    assert not any("mm" in name or "softmax" in name for name in names)


def test_another_epsilon_is_observed(tmp_path: Path) -> None:
    def larger(made: Any) -> None:
        made.layers[1].norm.eps = 1e-2

    found = first(observed(tmp_path, larger))
    assert (found.cause, found.kind) == ("hyperparameter", "scalar")
    assert found.said.startswith("epsilon 0.01 on the target instead of 1e-06 in rsqrt's input")


def test_the_same_code_differs_in_nothing(tmp_path: Path) -> None:
    assert observed(tmp_path, lambda _: None).differences == []
    assert observed(tmp_path / "2", lambda _: None, module=LAYER).differences == []


class Masked(RmsNorm):
    """Adds a mask of the lowest number, as attention does to its scores."""

    def __init__(self, size: float = 1.0, last: bool = False) -> None:
        super().__init__(24)
        self.size, self.last = size, last

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(24)
        hidden[5:] = torch.finfo(torch.float32).min
        scores = super().forward(x * self.size) + hidden
        return scores.softmax(-1).roll(1, -1) if self.last else scores.softmax(-1)


@pytest.mark.parametrize("last", [False, True])
def test_round_off_before_a_mask_is_no_difference_of_the_mask(tmp_path: Path, last: bool) -> None:
    """Scores beside the lowest number have no size that could be compared; their inputs differ."""

    def changed(size: float, last: bool) -> Callable[[nn.Module], None]:
        return lambda made: setattr(made.layers[1], "norm", Masked(size, last))  # type: ignore[attr-defined]

    sides = [run(tmp_path / "b", changed(1.0, False))[0],
             run(tmp_path / "t", changed(1.0 + 2.0**-23, last))[0]]  # fmt: skip
    found = observe(*sides)
    said = [d.said for d in found.differences if d.effective]
    assert not any("makes something else" in words for words in said), said
    assert any("roll" in words for words in said) == last


def test_what_was_given_other_numbers_is_not_said_to_be_given_the_same(tmp_path: Path) -> None:
    """A sine of large angles makes far more of their difference than it is."""

    def turned(size: float) -> Callable[[nn.Module], None]:
        def change(made: Any) -> None:
            made.layers[1].norm.weight.data.mul_(size)
            norm = made.layers[1].norm
            right = norm.forward
            norm.forward = lambda x: torch.sin(1e4 * right(x))

        return change

    sides = [run(tmp_path / str(size), turned(size))[0] for size in (1.0, 1.05)]
    found = observe(*sides)
    assert first(found).cause == "weights", found
    assert not [d for d in found.differences if d.kind == "kernel"], found.differences


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "factor": (lambda y: y * 1.01, "constant_factor", "mul.Tensor(other=1.01)"),
    "halved": (lambda y: y / 2, "constant_factor", "div.Tensor(other=2)"),
    "bf16": (lambda y: y.bfloat16().float(), "rounding_order", "_to_copy(dtype=torch.bfloat16)"),
    "clamp": (lambda y: y.clamp(max=0.5), "saturation", "clamp(max=0.5)"),
    "rolled": (lambda y: y.roll(3, -1), "layout", "roll"),
    "window": (
        lambda y: y.masked_fill(torch.ones(y.shape[1], 24, dtype=torch.bool).tril(-2), -3e38),
        "mask",
        "tril(diagonal=-2)",
    ),
    "halves": (lambda y: torch.cat([y[..., 12:], y[..., :12]], -1), "layout", "cat"),
    "dropout": (lambda y: nn.functional.dropout(y, 0.1), "nondeterministic", "bernoulli_"),
    "cap": (lambda y: 5 * torch.tanh(y / 5), "implementation", "tanh"),
    "half of it": (lambda y: y + y.flip(-1) * (y > 0), "implementation", "flip"),
    "repeated": (lambda y: torch.cat([y[..., :12], y[..., :12]], -1), "implementation", "cat"),
    "padded": (
        lambda y: torch.cat([y, torch.zeros_like(y[..., :1])], -1).softmax(-1)[..., :-1],
        "implementation",
        "cat",
    ),
    "noise": (lambda y: y + 0.01 * torch.cos(37 * y), "implementation", "cos"),
    "nothing left": (lambda y: y * 0.0, "implementation", "mul.Tensor(other=0"),
    "over infinity": (lambda y: y / math.inf, "implementation", "div.Tensor(other=inf"),
    "a number that is 0": (lambda y: y * torch.zeros(()), "implementation", "mul.Tensor(other=0"),
    "unused": (lambda y: (y * 3, y + 0.01)[1], "implementation", "add.Tensor(other=0.01"),
}


@pytest.mark.parametrize("name", CASES)
def test_operators_that_one_side_alone_runs_are_named(tmp_path: Path, name: str) -> None:
    make, cause, said = CASES[name]
    found = first(observed(tmp_path, wrapped(make)))
    assert found.cause == cause, found
    assert said in found.said and "which the benchmark does not" in found.said
    assert name != "unused" or "other=3" not in found.said


def test_a_parameter_or_buffer_that_differs_is_named(tmp_path: Path) -> None:
    def other(made: Any) -> None:
        with torch.no_grad():
            made.layers[1].norm.weight[3] = 1.1

    found = first(observed(tmp_path, other))
    assert (found.cause, found.kind) == ("weights", "constant")
    assert found.said.startswith("weight, given to aten::mul.Tensor")


def test_another_temperature_of_the_loss_is_observed(tmp_path: Path) -> None:
    def cooler(logits: Tensor) -> Tensor:
        return plain_loss(logits / 0.7)

    benchmark, _ = run(
        tmp_path / "b", kind="outputs", module=None, loss=lambda y: plain_loss(y / 1)
    )
    target, _ = run(tmp_path / "t", kind="outputs", module=None, loss=cooler)
    found = first(observe(benchmark, target))
    assert found.cause == "hyperparameter"
    assert "divisor 0.7 on the target instead of 1 in aten::div.Tensor" in found.said


def of_labels(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        chosen = torch.log_softmax(logits, -1).gather(-1, make(tokens())[..., None])
        return -chosen.mean()

    return loss


def filled(mask: Tensor) -> Tensor:
    moved = mask.roll(1, -1)
    moved[:, 0] = False
    return moved


@pytest.mark.parametrize(
    ("right", "wrong"),
    [(of_labels(lambda x: x), of_labels(lambda x: x.roll(-1, -1))),
     (of_labels(lambda x: x), of_labels(lambda x: x.flip(-1))),
     (of_masked(lambda m: m), of_masked(filled)),
     (of_masked(lambda m: m), of_masked(lambda m: m.logical_not()))],
)  # fmt: skip
def test_labels_and_masks_around_the_model_that_are_changed_are_observed(
    tmp_path: Path, right: Any, wrong: Any
) -> None:
    sides = [run(tmp_path / name, kind="outputs", module=None, loss=loss)[0]
             for name, loss in (("b", right), ("t", wrong))]  # fmt: skip
    found = first(observe(*sides))
    assert found.cause == "label_or_mask_shift", found
    # of numbers it is none
    scaled = run(tmp_path / "s", kind="outputs", module=None, loss=lambda x: right(x) * 1.5)[0]
    assert first(observe(sides[0], scaled)).cause == "constant_factor"


def test_another_clip_norm_is_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.utils.clip_grad_norm_
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, _: right(p, 0.5))
    target, _ = run(tmp_path / "t", kind="update", module=None)
    found = first(observe(benchmark, target))
    assert found.cause == "hyperparameter" and "0.5 on the target instead of 1" in found.said


def _each_by_its_own(parameters: list[Any]) -> None:
    for parameter in parameters:
        parameter.grad.mul_((0.1 / (parameter.grad.norm() + 1e-6)).clamp(max=1.0))


def _each_element(parameters: list[Any]) -> None:
    torch._foreach_clamp_max_([p.grad for p in parameters], 1e-3)


def _by_a_mean(parameters: list[Any]) -> None:
    size = torch.stack([p.grad.norm() for p in parameters]).mean()
    for parameter in parameters:
        parameter.grad.div_(1 + size)


@pytest.mark.parametrize("limit", [math.inf, 50.0])
@pytest.mark.parametrize("further", [_each_by_its_own, _each_element, _by_a_mean])
def test_a_number_that_switches_clipping_off_for_another_is_no_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: Any, limit: float
) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    right = torch.nn.utils.clip_grad_norm_

    def clip(parameters: Any, _: float) -> Any:
        parameters = list(parameters)
        total = right(parameters, limit)
        with torch.no_grad():
            further([p for p in parameters if p.grad is not None])
        return total

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    target, _ = run(tmp_path / "t", kind="update", module=None)
    found = first(observe(benchmark, target))
    assert found.cause == "implementation", found
    assert f"{limit:g} on the target instead of 1" in found.said
    assert "; besides, the target runs" in found.said
    # the other way round it is the benchmark that runs more
    found = first(observe(target, benchmark))
    assert found.cause == "implementation" and "the benchmark runs" in found.said


@pytest.mark.parametrize(
    "counted",
    [
        lambda parameters: [p for p in parameters if p.dim() > 1],
        lambda parameters: parameters[:-1],
        lambda parameters: parameters[1:],
    ],
    ids=["matrices alone", "all but the last", "all but the first"],
)
def test_a_norm_of_fewer_gradients_is_said_by_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: Any
) -> None:
    def clip(of: Any) -> Any:
        def clipped(parameters: Any, _: float) -> Any:
            parameters = list(parameters)
            norm = torch.nn.utils.get_total_norm([p.grad for p in of(parameters)])
            torch.nn.utils.clip_grads_with_norm_(parameters, 0.01, norm)
            return norm

        return clipped

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip(list))
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip(counted))
    target, _ = run(tmp_path / "t", kind="update", module=None)
    parameters = list(model().parameters())
    found = first(observe(benchmark, target))
    assert found.cause == "implementation", found
    assert f"is given {len(counted(parameters))} tensors as" in found.said
    assert found.said.endswith(f"on the target and {len(parameters)} on the benchmark")


def test_operators_that_change_weights_by_little_are_of_the_optimizer(tmp_path: Path) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    clip = torch.nn.utils.clip_grad_norm_

    def further(parameters: Any, limit: float) -> Any:
        parameters = list(parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1 - 1e-6)
        return clip(parameters, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", further)
        target, _ = run(tmp_path / "t", kind="update", module=None)
    # much less than the weights' noise, and not less than the change of them
    found = first(observe(benchmark, target, noise=1e-4))
    assert found.cause == "implementation" and "mul_.Tensor(other=0.999999)" in found.said


def test_what_one_side_runs_for_nothing_is_run_by_both(tmp_path: Path) -> None:
    def changed(used: bool) -> Callable[[nn.Module], None]:
        def change(y: Tensor) -> Tensor:
            sizes = y.abs().sum(-1, keepdim=True)
            return torch.where(sizes > 19, y, y * 1.5) if used else y

        return wrapped(change)

    benchmark, _ = run(tmp_path / "b", changed(False))
    target, _ = run(tmp_path / "t", changed(True))
    found = first(observe(benchmark, target))
    assert "gt.Scalar" in found.said and "abs" not in found.said and "sum" not in found.said


def test_another_learning_rate_is_observed(tmp_path: Path) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    target, _ = run(tmp_path / "t", kind="update", module=None, lr=3e-2)
    found = first(observe(benchmark, target))
    assert found.cause == "hyperparameter", "the same operators with another constant"
    assert found.said == "lr 0.03 on the target instead of 0.01 in group 0 of the optimizer, step 0"


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "format None"), ('{"record": "trace", "format": 9}\n', "format 9"),
     ("[1]\n", "no object"), ("{\n", "not a trace"),
     ('{"record": "trace", "format": 1}\n{"record": "operator", "n": "x"}\n', "not a trace")],
)  # fmt: skip
def test_a_damaged_trace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / trace.NAME).write_text(text)
    with pytest.raises(DumpError, match=said):
        trace.read(tmp_path / trace.NAME)
    assert trace.read(tmp_path / "none.jsonl") is None


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    def masked(y: Tensor) -> Tensor:
        return y + torch.where(y > 100, float("-inf"), 0.0)

    run(tmp_path, wrapped(masked))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    for line in (rank_dir(tmp_path) / trace.NAME).read_text().splitlines():
        json.loads(line, parse_constant=refuse)
