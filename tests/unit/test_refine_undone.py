"""What later operators undo is no cause: a scale in another place, and a fault behind it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe.refine.observe import observe  # noqa: E402
from rlprobe.refine.seen import of_traces  # noqa: E402
from rlprobe.refine.suspects import Plan  # noqa: E402
from rlprobe.spec import Suspects  # noqa: E402
from tests.unit.traced import first, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[[Tensor], Tensor]
LOWEST = torch.finfo(torch.float32).min
FAR = torch.arange(7)[:, None] - torch.arange(7)[None] >= 3
CAUSAL = torch.full((7, 7), LOWEST).triu(1)


def attention(
    scores: Make,
    capped: Make = lambda s: s,
    mask: Make = lambda m: m,
    weights: Make = lambda w: w,
) -> Make:
    def mixed(y: Tensor) -> Tensor:
        return weights(torch.softmax(capped(scores(y)) + mask(CAUSAL), -1)) @ y

    return mixed


def of_scores(y: Tensor) -> Tensor:
    return y @ y.transpose(1, 2) / 5


def of_queries(y: Tensor) -> Tensor:
    return (y / 5) @ y.transpose(1, 2)


def of_keys(y: Tensor) -> Tensor:
    return y @ (0.2 * y).transpose(1, 2)


def of_both(y: Tensor) -> Tensor:
    return (y * 0.5) @ (y * 0.4).transpose(1, 2)


def doubled_and_halved(y: Tensor) -> Tensor:
    return (y * 8) @ y.transpose(1, 2) / 5 / 8


FAULTS: dict[str, tuple[Callable[[Make], Make], str, str]] = {
    "a factor": (lambda s: (lambda y: 1.01 * attention(s)(y)), "constant_factor", "other=1.01"),
    "bf16": (
        lambda s: attention(s, weights=lambda w: w.bfloat16().float()), "rounding_order", "bfloat16"
    ),
    "cut": (lambda s: attention(s, weights=lambda w: w.clamp(max=0.1)), "saturation", "clamp"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scores", [of_queries, of_keys, of_both, doubled_and_halved])
def test_the_cause_is_behind_a_scale_in_another_place(
    tmp_path: Path, scores: Make, fault: str
) -> None:
    wrong, cause, said = FAULTS[fault]
    benchmark = run(tmp_path / "b", wrapped(attention(of_scores)))[0]
    target = run(tmp_path / "t", wrapped(wrong(scores)))[0]
    found = first(observe(benchmark, target, 1e-6, 1e-5, forward=True))
    assert found.cause == cause and said in found.said, found


@pytest.mark.parametrize("scores", [of_queries, of_keys, of_both, doubled_and_halved])
def test_a_scale_in_another_place_is_no_cause(tmp_path: Path, scores: Make) -> None:
    benchmark = run(tmp_path / "b", wrapped(attention(of_scores)))[0]
    target = run(tmp_path / "t", wrapped(attention(scores)))[0]
    found = observe(benchmark, target, 1e-6, 1e-5, forward=True)
    assert found.first is None
    undone = [d for d in found.differences if d.undone]
    # two that make up for another in one stretch hand on what agrees
    assert bool(undone) is (scores is not of_both)
    assert all(d.said.endswith("; later operators undo that") for d in undone)
    plan = cast("Plan", SimpleNamespace(floor=1e-5))
    said = of_traces(found, plan, cast("Suspects", None)).evidence[0]
    assert said.endswith(", or later operators undo what they change") is bool(undone)
    assert observe(benchmark, target, 1e-6, 1e-5).first is None, "nor in the backward pass"


@pytest.mark.parametrize(
    "scores",
    [
        lambda y: (y / 2.5) @ y.transpose(1, 2),
        lambda y: (y * 0.1) @ y.transpose(1, 2),
        lambda y: (y * 3) @ y.transpose(1, 2) / 5,
    ],
)
def test_a_scale_that_nothing_takes_back_is_a_factor(tmp_path: Path, scores: Make) -> None:
    benchmark = run(tmp_path / "b", wrapped(attention(of_scores)))[0]
    target = run(tmp_path / "t", wrapped(attention(scores)))[0]
    assert first(observe(benchmark, target, 1e-6, 1e-5)).cause == "constant_factor"


def test_a_scale_that_moves_behind_what_bends_is_no_factor_by_itself(tmp_path: Path) -> None:
    """The same number on both sides, in places that are not alike."""
    benchmark = run(tmp_path / "b", wrapped(attention(of_scores)))[0]
    cap = attention(of_queries, capped=lambda s: 5 * torch.tanh(s / 5))
    target = run(tmp_path / "t", wrapped(cap))[0]
    assert first(observe(benchmark, target, 1e-6, 1e-5, forward=True)).cause == "implementation"


@pytest.mark.parametrize("scores", [of_queries, of_keys, of_both, doubled_and_halved])
def test_what_hides_in_the_same_stretch_is_no_factor(tmp_path: Path, scores: Make) -> None:
    benchmark = run(tmp_path / "b", wrapped(attention(of_scores)))[0]
    window = attention(scores, mask=lambda m: m.masked_fill(FAR, LOWEST))
    target = run(tmp_path / "t", wrapped(window))[0]
    found = observe(benchmark, target, 1e-6, 1e-5, forward=True)
    assert first(found).cause in ("mask", "implementation")
    assert any("masked_fill" in d.said for d in found.differences if d.effective)


def test_what_is_left_in_a_gradient_is_not_undone(tmp_path: Path) -> None:
    def straight(y: Tensor) -> Tensor:
        return 2 * y - y.detach()

    benchmark = run(tmp_path / "b", wrapped(lambda y: y))[0]
    target = run(tmp_path / "t", wrapped(straight))[0]
    assert observe(benchmark, target, 1e-6, 1e-5, forward=True).first is None
    assert observe(benchmark, target, 1e-6, 1e-5).first is not None
