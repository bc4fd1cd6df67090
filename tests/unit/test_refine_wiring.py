"""What operators are given that belongs elsewhere: operands, parts and parameters exchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.autograd import Function  # noqa: E402

from rlprobe.refine.difference import sized  # noqa: E402
from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.traced import first, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[["Parts", Tensor], Tensor]


class Parts(nn.Module):
    """A fused projection, two others, and two parameters of one shape."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        self.both, self.one, self.other = nn.Linear(24, 48), nn.Linear(24, 24), nn.Linear(24, 24)
        self.act = nn.SiLU()
        self.first, self.second = (nn.Parameter(torch.randn(24, 24) / 5) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self, x)


def parts(make: Make) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        torch.manual_seed(3)
        made.layers[1].norm = Parts(make)

    return change


def gate_first(m: Parts, x: Tensor) -> Tensor:
    gate, up = m.both(x).chunk(2, -1)
    return m.act(gate) * up


def up_first(m: Parts, x: Tensor) -> Tensor:
    up, gate = m.both(x).chunk(2, -1)
    return m.act(gate) * up


def up_first_by_slices(m: Parts, x: Tensor) -> Tensor:
    fused = m.both(x)
    return m.act(fused[..., 24:]) * fused[..., :24]


def gate_twice(m: Parts, x: Tensor) -> Tensor:
    gate, _ = m.both(x).chunk(2, -1)
    return m.act(gate) * gate


def up_alone(m: Parts, x: Tensor) -> Tensor:
    _, up = m.both(x).chunk(2, -1)
    return m.act(up) * up


def _less(turned: bool) -> Make:
    def make(m: Parts, x: Tensor) -> Tensor:
        one, other = m.one(x), m.other(x)
        return other - one if turned else one - other

    return make


def _products(turned: bool) -> Make:
    def make(m: Parts, x: Tensor) -> Tensor:
        one, other = m.one(x), m.other(x)[:, :, :7]
        one = one[:, :, :7]
        return nn.functional.pad(other @ one if turned else one @ other, (0, 17))

    return make


def _inner(turned: bool) -> Make:
    """Products that both sides make, in another order."""

    def make(m: Parts, x: Tensor) -> Tensor:
        one, other = (m.second, m.first) if turned else (m.first, m.second)
        return m.act(x @ one) * (x @ other)

    return make


def _parameters(turned: bool) -> Make:
    def make(m: Parts, x: Tensor) -> Tensor:
        one, other = (m.second, m.first) if turned else (m.first, m.second)
        return x @ (m.act(one) @ other)

    return make


@pytest.mark.parametrize(
    ("right", "wrong", "cause", "said"),
    [
        (gate_first, up_first, "layout", "either side uses the other's part in another place"),
        (gate_first, up_first_by_slices, "layout", "either side uses the other's part"),
        (gate_first, up_alone, "implementation", "numbers that agree before"),
        (gate_first, gate_twice, "implementation", "numbers that agree before"),
        (_less(False), _less(True), "implementation", "the two have traded places"),
        (_products(False), _products(True), "layout", "the two have traded places"),
        (_inner(False), _inner(True), "layout", "the two have traded places"),
        (_parameters(False), _parameters(True), "layout", "given second on the target, and first"),
    ],
)
def test_what_is_given_in_anothers_place_is_named(
    tmp_path: Path, right: Make, wrong: Make, cause: str, said: str
) -> None:
    sides = [run(tmp_path / n, parts(make))[0] for n, make in (("b", right), ("t", wrong))]
    found = first(observe(*sides, forward=True))
    assert (found.cause, said in found.said) == (cause, True), found.said


def test_the_same_parts_in_the_same_places_differ_in_nothing(tmp_path: Path) -> None:
    sides = [run(tmp_path / n, parts(gate_first))[0] for n in "bt"]
    assert observe(*sides, forward=True).first is None


def _gained(turned: bool) -> Callable[[Tensor], Tensor]:
    """A loss of two parts of its logits."""

    def loss(logits: Tensor) -> Tensor:
        one, other = logits[:, :-1], logits[:, 1:]
        one, other = (other, one) if turned else (one, other)
        return (torch.sigmoid(one) * torch.tanh(other)).mean()

    return loss


def test_what_trades_places_in_a_loss_is_no_layout(tmp_path: Path) -> None:
    sides = [
        run(tmp_path / str(turned), kind="outputs", module=None, loss=_gained(turned))[0]
        for turned in (False, True)
    ]
    found = first(observe(*sides))
    assert found.cause == "implementation" and found.kind == "views", found


def _turned(back: bool) -> Callable[[Tensor], Tensor]:
    angles = torch.outer(torch.arange(7.0) + 1, torch.linspace(1.0, 0.3, 12)).repeat(1, 2)

    def turn(y: Tensor) -> Tensor:
        one, other = y[..., :12], y[..., 12:]
        half = torch.cat([-one, other] if back else [-other, one], -1)
        return y * angles.cos() + half * angles.sin()

    return turn


def test_halves_of_a_rotation_that_trade_places_are_of_other_positions(tmp_path: Path) -> None:
    sides = [
        run(tmp_path / n, wrapped(_turned(back)))[0] for n, back in (("b", False), ("t", True))
    ]
    found = first(observe(*sides, forward=True))
    assert found.cause == "position", found.said


class _Detached(nn.Module):
    """A norm whose backward pass takes the root for a constant, or not."""

    def __init__(self, detached: bool, swap: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.detached, self.swap = detached, swap

    def forward(self, x: Tensor) -> Tensor:
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        root = root.detach() if self.detached else root
        return self.weight * (root * x if self.swap else x * root)


def _norm(**options: bool) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        made.layers[1].norm = _Detached(**options)

    return change


class _Linear(Function):
    """A product whose backward pass begins with either of its two, and loses rows of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, lost: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.lost = lost
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        d = gradients[0]
        dx = d @ w
        dw = d.reshape(-1, 24).t() @ x.reshape(-1, 24)
        if ctx.lost:
            dw[-ctx.lost :] = 0.0
        return dx, dw, None


def _linear(lost: int | None) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        torch.manual_seed(3)
        norm = nn.Linear(24, 24, bias=False)
        made.layers[1].norm = norm
        if lost is not None:
            norm.forward = lambda x: _Linear.apply(x, norm.weight, lost)

    return change


@pytest.mark.parametrize(
    ("right", "wrong", "said", "never"),
    [
        (_norm(detached=False), _norm(detached=True), "the benchmark runs aten::mul", "the target"),
        (_norm(detached=False), _norm(detached=True, swap=True), "the benchmark runs", "is given"),
        (_linear(None), _linear(3), "fill_", "aten::mm"),
        (_linear(0), _linear(3), "fill_", "aten::mm"),
    ],
)
def test_products_of_a_backward_pass_are_not_taken_for_each_other(
    tmp_path: Path, right: Any, wrong: Any, said: str, never: str
) -> None:
    sides = [run(tmp_path / n, change)[0] for n, change in (("b", right), ("t", wrong))]
    found = first(observe(*sides))
    text = found.said.replace("which the target does not", "").replace("which the benchmark", "")
    assert (found.cause, said in text, never in text) == ("implementation", True, False), text


@pytest.mark.parametrize(
    ("size", "count", "said"),
    [(0.314, 62, "about 0.31"), (0.314, 61, "0.31"), (0.314, 1, "0.31"), (0.0, 4096, "0")],
)
def test_a_size_that_a_sketch_tells_is_said_to_be_about(size: float, count: int, said: str) -> None:
    assert sized(size, count) == said
