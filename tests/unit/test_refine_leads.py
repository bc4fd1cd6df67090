"""What numbers are by what they lead to, and what is another constant or another computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from rlprobe.refine.observe import observe  # noqa: E402
from tests.unit.traced import run  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[..., Tensor]


class Attention(nn.Module):
    """One head that is rotated, masked and gated, of which a test replaces a part."""

    def __init__(self, **parts: Make) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.queries, self.keys, self.out = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.parts = parts

    def part(self, name: str, given: Tensor) -> Tensor:
        return self.parts[name](given) if name in self.parts else given

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        places = self.part("places", torch.arange(count).float())
        angles = places[:, None] / 100 ** (torch.arange(12.0) / 12)
        cosines, sines = self.part("cosines", angles.cos()), angles.sin()

        def turned(y: Tensor) -> Tensor:
            one, other = y[..., :12], y[..., 12:]
            return torch.cat([one * cosines - other * sines, other * cosines + one * sines], -1)

        scores = turned(self.queries(x)) @ turned(self.keys(x)).transpose(-1, -2) / math.sqrt(24)
        hidden = self.part("hidden", torch.ones(count, count, dtype=torch.bool).triu(1))
        weights = torch.softmax(scores.masked_fill(hidden, -1e9), -1)
        mixed = self.part("mixed", weights @ x)
        kept = self.part("kept", mixed > 0)
        mixed = self.part("gated", mixed.masked_fill(kept, 0.1))
        return self.out(self.parts.get("last", functional.gelu)(mixed))


_BENCHMARKS: dict[str, Any] = {}


def cause(tmp_path: Path, wrong: dict[str, Make], right: dict[str, Make] | None = None) -> str:
    def build(parts: dict[str, Make]) -> Callable[[Any], None]:
        def change(made: Any) -> None:
            made.layers[1].norm = Attention(**parts)

        return change

    key = str(right)
    if key not in _BENCHMARKS:
        _BENCHMARKS[key] = run(tmp_path / "b", build(right or {}))[0]
    first = observe(_BENCHMARKS[key], run(tmp_path / "t", build(wrong))[0]).first
    assert first is not None
    return first.cause


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("places", lambda p: p * 2, "position"),
        ("places", lambda p: p / 1.5, "position"),
        ("places", lambda p: p.clamp(max=4), "position"),
        ("places", lambda p: p.flip(0), "position"),
        ("places", lambda p: torch.remainder(p, 4), "position"),
        ("places", lambda p: p + 1, "position"),
        ("cosines", lambda c: c * 0.97, "constant_factor"),
        ("mixed", lambda m: m * 2, "constant_factor"),
        ("mixed", lambda m: m.clamp(min=-0.01), "saturation"),
        ("mixed", lambda m: m.flip(0), "layout"),
    ],
)
def test_what_leads_to_nothing_but_cosines_and_sines_are_positions(
    tmp_path: Path, part: str, change: Make, expected: str
) -> None:
    assert cause(tmp_path, {part: change}) == expected


@pytest.mark.parametrize(
    ("part", "change", "expected"),
    [
        ("hidden", lambda h: h.roll(1, 0), "mask"),
        ("hidden", lambda h: h.logical_or(torch.ones(7, 7, dtype=torch.bool).tril(-4)), "mask"),
        ("kept", lambda k: k.logical_not(), "implementation"),
        ("kept", lambda k: k.roll(1, -1), "implementation"),
        ("kept", lambda k: k.logical_and(k.roll(1, 1)), "implementation"),
        ("gated", lambda g: g.masked_fill(g > 0.05, -1e9), "implementation"),
    ],
)
def test_a_mask_that_hides_no_score_says_nothing_of_who_attends_to_whom(
    tmp_path: Path, part: str, change: Make, expected: str
) -> None:
    assert cause(tmp_path, {part: change}) == expected


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        (lambda y: y.pow(2), lambda y: y.pow(3), "implementation"),
        (
            lambda y: functional.gelu(y, approximate="none"),
            lambda y: functional.gelu(y, approximate="tanh"),
            "implementation",
        ),
        (
            lambda y: y / torch.linalg.vector_norm(y, 2, -1, keepdim=True),
            lambda y: y / torch.linalg.vector_norm(y, 1, -1, keepdim=True),
            "implementation",
        ),
        (lambda y: y - y.mean(1, keepdim=True), lambda y: y - y.mean(0, keepdim=True),
         "implementation"),
        (lambda y: y * 2.0, lambda y: y * 3.0, "hyperparameter"),
        (
            lambda y: functional.layer_norm(y, (24,), eps=1e-5),
            lambda y: functional.layer_norm(y, (24,), eps=1e-2),
            "hyperparameter",
        ),
    ],
    ids=["power", "word", "norm", "dimension", "factor", "epsilon"],
)  # fmt: skip
def test_words_dimensions_powers_and_norms_are_no_constants(
    tmp_path: Path, right: Make, wrong: Make, expected: str
) -> None:
    assert cause(tmp_path, {"last": wrong}, {"last": right}) == expected


@pytest.mark.parametrize("kept", [True, False], ids=["kept beside", "a parameter"])
def test_what_is_used_as_a_weight_and_is_no_parameter_is_not_said_to_be_one(
    tmp_path: Path, kept: bool
) -> None:
    def change(factor: float) -> Callable[[Any], None]:
        def changed(made: Any) -> None:
            norm = made.layers[1].norm
            numbers = torch.linspace(0.5, 1.5, 24) * factor
            if not kept:
                norm.weight.data.copy_(numbers)
            weight = numbers if kept else norm.weight
            norm.forward = lambda x: functional.layer_norm(x, (24,), weight)

        return changed

    sides = [run(tmp_path / str(f), change(f))[0] for f in (1.0, 1.1)]
    first = observe(*sides).first
    assert first is not None and first.cause == ("unknown" if kept else "weights"), first
