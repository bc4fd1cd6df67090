"""A suspect run again: does it repeat, forward and backward, and which side is nearer to fp64?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.autograd import Function  # noqa: E402

from rlprobe.capture.trace import operators  # noqa: E402
from rlprobe.refine import experiments, refined, trace  # noqa: E402
from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.traced import backward, first, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda y: y + 0.1 * torch.randn(y.shape), "nondeterministic"),
        (lambda y: nn.functional.dropout(y, 0.1), "nondeterministic"),
        # a generator of its own, seeded anew at each call: the same numbers each time
        (
            lambda y: y + 0.1 * torch.randn(y.shape, generator=torch.Generator().manual_seed(5)),
            "implementation",
        ),
        (lambda y: y * torch.rand(y.shape, generator=torch.Generator().manual_seed(1)),
         "implementation"),
    ],
)  # fmt: skip
def test_what_draws_the_same_each_time_is_not_random(
    tmp_path: Path, change: Any, cause: str
) -> None:
    benchmark, _ = run(tmp_path / "b")
    target, _ = run(tmp_path / "t", wrapped(change))
    watched = observe(benchmark, target)
    assert first(watched).cause == "nondeterministic", "by its operators alone"
    found = refined._seen(
        watched,
        [SimpleNamespace(trace=one) for one in (benchmark, target)],  # type: ignore[misc]
        SimpleNamespace(origin="module"),  # type: ignore[arg-type]
        SimpleNamespace(  # type: ignore[arg-type]
            trace_module="layers.1.norm", record="Module.layers.1.norm.Norm.forward.0.output.0"
        ),
    )
    assert found.cause == cause
    told = [line for line in found.evidence if "draws the same each time" in line]
    assert bool(told) is (cause == "implementation")


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
