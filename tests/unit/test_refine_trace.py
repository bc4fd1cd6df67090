"""Operators of a suspect: recorded without effect, paired, and the first that differs named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.autograd import Function  # noqa: E402

from rlprobe.capture.trace import operators  # noqa: E402
from rlprobe.errors import DumpError  # noqa: E402
from rlprobe.refine import experiments, trace  # noqa: E402
from rlprobe.refine.difference import Difference  # noqa: E402
from rlprobe.refine.observe import Observed, observe  # noqa: E402
from tests.unit.capture_helpers import UPDATE, Tiny, rank_dir, recorder, tokens  # noqa: E402

pytestmark = pytest.mark.slow

LAYER = "layers.1"
NORM = f"{LAYER}.norm"


class RmsNorm(nn.Module):
    """As transformers write it."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = Tiny()
    for layer in made.layers:
        layer.norm = RmsNorm(24)
    return made


def run(
    root: Path,
    change: Callable[[nn.Module], None] = lambda _: None,
    kind: str | None = "module",
    module: str | None = NORM,
    loss: Callable[[Tensor], Tensor] | None = None,
    lr: float = 1e-2,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """Two micro-batches and a step; the trace and the weights after it."""
    made = model()
    change(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=lr)
    chosen = recorder(
        root, tensors=True, modules=(LAYER,), micro_steps=(0,), trace=kind, trace_module=module,
        **options,
    )  # fmt: skip
    picked = tokens()
    with chosen.stage(UPDATE, 0, 1, made, optimizer=optimizer) as scope:
        for index in range(2):
            scope.micro_step(index)
            logits = made(picked)
            made_loss = (loss or plain_loss)(logits)
            made_loss.backward()
            scope.loss("loss", made_loss)
        scope.gradients("grad_reduced")
        scope.gradient_norms(optimizer)
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in made.named_parameters()}
    return trace.read(rank_dir(root) / trace.NAME), weights


def plain_loss(logits: Tensor) -> Tensor:
    chosen = torch.log_softmax(logits, -1).gather(-1, tokens()[..., None])
    return -chosen.mean()


def observed(tmp_path: Path, change: Callable[[nn.Module], None], **options: Any) -> Observed:
    benchmark, _ = run(tmp_path / "b", **{k: v for k, v in options.items() if k != "loss"})
    target, _ = run(tmp_path / "t", change, **options)
    return observe(benchmark, target)


def first(found: Observed) -> Difference:
    assert found.first is not None, found
    return found.first


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
    assert add.site is not None and add.site.startswith("test_refine_trace.py:")
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


def wrapped(make: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """Let the norm return something made of what it returns."""

    def change(made: Any) -> None:
        norm = made.layers[1].norm
        right = norm.forward
        norm.forward = lambda x: make(right(x))

    return change


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
    assert (found.cause, found.kind) == ("weights", "value")
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


def of_masked(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def loss(logits: Tensor) -> Tensor:
        picked = tokens()
        chosen = torch.log_softmax(logits, -1).gather(-1, picked[..., None])[..., 0]
        mask = make(picked > 3)
        return -(chosen * mask).sum() / 10

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


def test_what_adds_gradients_up_is_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    assert not [op for op in benchmark.operators if op.repeats is not None]
    asked: list[str] = []
    copied = operators._again

    def racing(func: Any, args: Any, kwargs: Any) -> list[Tensor] | None:
        made = copied(func, args, kwargs)
        asked.append(operators.name_of(func))
        return None if made is None else [t + 1e-3 for t in made]

    monkeypatch.setattr(operators, "_again", racing)
    target, weights = run(tmp_path / "t", kind="update", module=None)
    adds = [op for op in target.operators if op.repeats is False]
    assert adds and {op.direction for op in adds} == {"backward"}
    assert {op.name for op in adds} <= set(asked) and "aten::add_.Tensor" in asked
    found = first(observe(benchmark, target))
    assert found.cause == "nondeterministic" and "run twice on the same" in found.said
    assert "on the target" in found.said
    assert observe(target, target).first is None, "both alike"
    monkeypatch.undo()
    _, plain = run(tmp_path / "p", kind=None, module=None)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_collectives_are_not_run_again_by_one_rank(tmp_path: Path) -> None:
    import torch.distributed as dist

    def summed(y: Tensor) -> Tensor:
        y = y.clone()
        dist.all_reduce(y)
        return y

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0,
                            world_size=1)  # fmt: skip
    try:
        found, _ = run(tmp_path / "t", wrapped(summed))
    finally:
        dist.destroy_process_group()
    for again in (found.again, found.again_backward):
        assert "needs the other ranks" in again.failed
        assert "needs the other ranks" in again.wide_failed


def test_another_learning_rate_is_observed(tmp_path: Path) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    target, _ = run(tmp_path / "t", kind="update", module=None, lr=3e-2)
    found = first(observe(benchmark, target))
    assert found.cause == "hyperparameter", "the same operators with another constant"
    assert found.said == "lr 0.03 on the target instead of 0.01 in group 0 of the optimizer, step 0"


def test_the_suspect_is_run_again(tmp_path: Path) -> None:
    found, _ = run(tmp_path)
    assert found.again is not None
    assert (found.again.repeats, found.again.draws, found.again.failed) == (True, False, None)
    assert found.again.wide[0].dtype == "torch.float64" and found.again.wide_failed is None
    random, weights = run(tmp_path / "r", wrapped(lambda y: nn.functional.dropout(y, 0.1)))
    assert (random.again.repeats, random.again.draws) == (True, True)
    # the generators stand where they would without: the second norm call draws the same
    _, plain = run(tmp_path / "p", wrapped(lambda y: nn.functional.dropout(y, 0.1)), kind=None)
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_a_race_does_not_repeat(tmp_path: Path) -> None:
    calls = iter(range(100))
    found, _ = run(tmp_path, wrapped(lambda y: y + 1e-3 * next(calls)))
    assert found.again.repeats is False and found.again.difference > 1e-4
    other, _ = run(tmp_path / "b")
    side = experiments.Side(other.again, [], [])
    judged = experiments.judge(side, experiments.Side(found.again, [], []))
    assert judged.cause == "nondeterministic" and "the target makes other numbers" in (
        judged.statement
    )
    # another run that makes the same numbers: no race, but a module that keeps something
    kept = experiments.judge(side, experiments.Side(found.again, [], []), stable=True)
    assert kept.cause is None and "it keeps something from call to call" in kept.evidence[0]
    # its last bits are others each time: that is no cause of a difference that is larger
    import numpy as np

    exact = np.ones((2, 4))
    for factor, cause in ((1.0001, "nondeterministic"), (2.0, None)):
        own = experiments.Side(trace.Again(repeats=True, draws=False), [exact], [])
        race = trace.Again(repeats=False, draws=False, difference=1e-4)
        judged = experiments.judge(own, experiments.Side(race, [factor * exact], []))
        assert judged.cause == cause and "makes other numbers" in judged.evidence[0]
    both = experiments.Side(found.again, [], [])
    assert experiments.judge(both, both).cause is None


SEEDS: Iterator[int] = iter(range(1000))


class Backwards(Function):
    """The identity, whose gradients are what ``change`` makes of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return ctx.change(gradients[0]), None


def backward(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A norm whose weight alone is given other gradients."""

    def change_of(made: Any) -> None:
        norm = made.layers[1].norm

        def forward(x: Tensor) -> Tensor:
            wide = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
            return Backwards.apply(norm.weight, change) * wide

        norm.forward = forward

    return change_of


def test_the_backward_pass_is_run_again(tmp_path: Path) -> None:
    found, _ = run(tmp_path)
    back = found.again_backward
    assert (back.repeats, back.draws, back.failed, back.wide_failed) == (True, False, None, None)
    assert [g.name for g in back.made] == [g.name for g in back.wide] == ["input 0", "weight"]
    assert {g.dtype for g in back.wide} == {"torch.float64"}
    # what it makes the second time is what the pass itself made
    made = next(op for op in reversed(found.operators) if op.outputs[0].shape == [24])
    assert back.made[1].digest == made.outputs[0].digest
    errors = [trace.error(wide, made) for wide, made in zip(back.wide, back.made, strict=True)]
    assert all(size is not None and 0 < size < 1e-6 for size in errors)


@pytest.mark.parametrize(
    ("name", "change", "draws"),
    [
        ("race", lambda g: g + 1e-3 * torch.randn(24, generator=torch.Generator().manual_seed(
            next(SEEDS))), False),
        ("rounded at random", lambda g: g * (1 + 1e-3 * torch.rand(24)), True),
    ],
)  # fmt: skip
def test_a_backward_pass_that_is_random_is_no_other_cause(
    tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], draws: bool
) -> None:
    found, weights = run(tmp_path, backward(change))
    back = found.again_backward
    assert found.again.repeats and (back.repeats, back.draws) == (draws, draws or back.draws)
    assert draws or back.differs == ["weight"]
    side, other = (experiments.Side(t.again, [], [], t.again_backward)
                   for t in (found, run(tmp_path / "b")[0]))  # fmt: skip
    judged = experiments.judge(other, side)
    assert judged.cause == "nondeterministic" and "backward" in judged.statement
    assert experiments.judge(side, side).cause is None
    if draws:  # generators stand where they would without
        _, plain = run(tmp_path / "p", backward(change), kind=None)
        assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_a_backward_pass_that_writes_over_what_it_kept_is_no_race(tmp_path: Path) -> None:
    class InPlace(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.kept = x.clone(), weight.detach()
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
            x, weight = ctx.kept
            return gradients[0] * weight, x.mul_(gradients[0]).sum((0, 1))

    def change(made: Any) -> None:
        norm = made.layers[1].norm
        norm.forward = lambda x: InPlace.apply(x, norm.weight)

    found, _ = run(tmp_path, change)
    assert found.again_backward.repeats and not found.again_backward.draws


def test_fp64_says_which_sides_backward_pass_is_wrong() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    exact = rng.standard_normal((8, 16))
    far = {"weight": exact + 1e-3 * rng.standard_normal(exact.shape)}
    again, same = trace.Again(repeats=True, draws=False), {"weight": exact}
    back = trace.AgainBackward(repeats=True, draws=False)

    def side(made: Any) -> experiments.Side:
        return experiments.Side(again, [], [], back, made, same)

    near = {"weight": exact * (1 + 1e-7)}
    wrong = experiments.judge(side(near), side(far), backward=True)
    assert wrong.cause == "implementation" and wrong.statement.startswith("backward, in fp64, both")
    # where the sides part in the forward pass what the backward makes is a consequence
    assert experiments.judge(side(near), side(far)).cause is None
    assert experiments.judge(side(far), side(near), backward=True).cause is None


def test_fp64_says_which_side_is_wrong() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    exact = rng.standard_normal((8, 16))
    near, far = exact * (1 + 1e-7), exact + 1e-3 * rng.standard_normal(exact.shape)
    again = trace.Again(repeats=True, draws=False)
    side = experiments.Side
    wrong = experiments.judge(side(again, [near], [exact]), side(again, [far], [exact]))
    assert wrong.cause == "implementation" and wrong.ratio is not None and wrong.ratio > 1000
    other = experiments.judge(side(again, [far], [exact]), side(again, [near], [exact]))
    assert other.cause is None, "the benchmark is the one that is off"
    short = frozenset({"torch.float32", "torch.float16", "torch.int64"})
    rounded = experiments.judge(
        side(again, [near], [exact], formats=frozenset({"torch.float32"})),
        side(again, [far], [exact], formats=short),
    )
    assert rounded.cause == "rounding_order" and "work on float16, the" in rounded.statement
    cut = experiments.judge(
        side(again, [near], [exact], formats=frozenset({"torch.float32"})),
        side(again, [exact.clip(-1, 1)], [exact], formats=short),
    )
    assert cut.cause == "implementation", "no rounding to fp16 is off by so much"
    alike = [side(again, [a], [exact], formats=short) for a in (near, far)]
    assert experiments.judge(alike[0], alike[1]).cause == "implementation"
    # what the inputs' own difference makes in fp64 is no other function
    beside = exact * (1 + 1e-5)
    sides = side(again, [near], [exact]), side(again, [far], [beside])
    assert experiments.judge(*sides).cause == "implementation"
    beside = exact + 2e-4 * rng.standard_normal(exact.shape)
    sides = side(again, [near], [exact]), side(again, [far], [beside])
    assert experiments.judge(*sides).cause is None
    assert experiments.judge(*sides, given=1e-4).cause == "implementation"
    assert experiments.judge(*sides, given=1e-5).cause is None
    another = experiments.judge(side(again, [near], [exact]), side(again, [far], [far]))
    assert another.cause is None and "they compute something else" in another.evidence[-1]


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
