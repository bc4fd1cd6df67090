"""What operators of one side alone do to what both go on with: known by the values, or not said."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from rlprobe.refine.observe import observe  # noqa: E402
from rlprobe.refine.trace import Operator  # noqa: E402
from tests.unit.traced import Make, first, plain_loss, run, seen, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

PLACES = torch.arange(7)


def in_int8(y: Tensor) -> Tensor:
    scale = y.abs().amax(-1, keepdim=True) / 127
    return torch.round(y / scale) * scale


def in_e5m2(y: Tensor) -> Tensor:
    scale = 1000 / y.abs().max()
    return (y * scale).to(torch.float8_e5m2).float() / scale


def part(kind: str) -> Make:
    def changed(y: Tensor) -> Tensor:
        y = y.clone()
        if kind == "channel":
            y.select(-1, 5).mul_(1.5)
        elif kind == "nothing":
            y[:, 3:].mul_(0.0)
        elif kind == "tokens":
            y[:, 2:4] /= 4
        elif kind == "cut":
            y[:, 3:].clamp_(max=0.1)
        else:
            y[:, 3:].add_(0.1)
        return y

    return changed


def turned(y: Tensor) -> Tensor:
    angles = torch.outer(PLACES.float(), torch.tensor([1.0, 0.5]).repeat(6)) + 1
    pairs = torch.view_as_complex(y.view(*y.shape[:-1], 12, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def half_turned(y: Tensor) -> Tensor:
    angle = torch.tensor([0.5, 1.0]).repeat(6).repeat(2)
    one, other = y.chunk(2, -1)
    return y * angle.cos() + torch.cat([-other, one], -1) * angle.sin()


def mirrored(y: Tensor) -> Tensor:
    """As long as it was, and no rotation by angles."""
    width = y.shape[-1]
    direction = torch.ones(width) / math.sqrt(width)
    return y - 2 * (y @ direction)[..., None] * direction


def by_bits(kept: int, *, nearest: bool) -> Make:
    """Floats of so many bits of fraction, by their bits."""

    def changed(y: Tensor) -> Tensor:
        bits = y.contiguous().view(torch.int32)
        bits = bits + (1 << (22 - kept)) if nearest else bits
        return (bits & (-1 << (23 - kept))).view(torch.float32)

    return changed


def signs_flipped(y: Tensor) -> Tensor:
    return (y.contiguous().view(torch.int32) ^ (-1 << 31)).view(torch.float32)


EFFECTS: dict[str, tuple[Make, str]] = {
    "int8": (in_int8, "rounding_order"),
    "e5m2": (in_e5m2, "rounding_order"),
    "tenths": (lambda y: torch.round(y * 10) / 10, "rounding_order"),
    "ten bits": (by_bits(10, nearest=True), "rounding_order"),
    "seven bits, cut off": (by_bits(7, nearest=False), "rounding_order"),
    "other bits": (signs_flipped, "implementation"),
    "floored far": (lambda y: torch.round(y), "implementation"),
    "a channel": (part("channel"), "constant_factor"),
    "some tokens": (part("tokens"), "constant_factor"),
    "a part is cut": (part("cut"), "saturation"),
    "nothing of a part is left": (part("nothing"), "implementation"),
    "a part is offset": (part("offset"), "implementation"),
    "between two": (lambda y: torch.clamp(y, -y.std(), 2 * y.std()), "saturation"),
    "between two by hand": (
        lambda y: torch.maximum(torch.minimum(y, y.std()), -y.std()),
        "saturation",
    ),
    "below an own number": (lambda y: torch.minimum(y, y.amax() / 2), "saturation"),
    "between elements": (
        lambda y: torch.clamp(y, y.flip(-1) - 0.1, y.flip(-1) + 0.1),
        "implementation",
    ),
    "the smaller": (lambda y: torch.minimum(y, torch.tensor(0.3)), "saturation"),
    "the larger of two": (lambda y: torch.maximum(y, y.flip(-1)), "implementation"),
    "complex": (turned, "position"),
    "halves": (half_turned, "position"),
    "mirrored": (mirrored, "implementation"),
    "cosines": (lambda y: y * torch.cos(y), "implementation"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_an_effect_is_known_by_its_values(tmp_path: Path, name: str) -> None:
    wrong, cause = EFFECTS[name]
    found = seen(tmp_path, lambda y: y, wrong, "as it is")
    assert found.cause == cause, found


def rotary(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Make:
    """Halves turned by a table of cosines and one of sines, which ``change`` makes others of."""

    def turn(y: Tensor) -> Tensor:
        angles = torch.outer(PLACES.float() + 1, torch.tensor([1.0, 0.3]).repeat(6).repeat(2))
        cos, sin = change(angles.cos(), angles.sin())
        one, other = y.chunk(2, -1)
        return y * cos + torch.cat([-other, one], -1) * sin

    return turn


ANGLES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "turned back": (lambda cos, sin: (cos, sin * -1.0), "position"),
    "negated": (lambda cos, sin: (cos, -sin), "position"),
    "a token late": (lambda cos, sin: (cos.roll(1, 0), sin.roll(1, 0)), "position"),
    "from the end": (lambda cos, sin: (cos.flip(0), sin.flip(0)), "position"),
    # longer vectors are no others' positions
    "scaled": (lambda cos, sin: (cos * 1.2, sin * 1.2), "constant_factor"),
}


@pytest.mark.parametrize("name", ANGLES)
def test_other_tables_of_angles_are_other_positions(tmp_path: Path, name: str) -> None:
    change, cause = ANGLES[name]
    right = rotary(lambda cos, sin: (cos, sin))
    found = seen(tmp_path, right, rotary(change), "rotary")
    assert found.cause == cause, found


def of_neighbours(cos: Tensor, sin: Tensor) -> Make:
    """Channels are paired with their neighbours, and not with those half a head further."""

    def turn(y: Tensor) -> Tensor:
        one, other = y[..., ::2], y[..., 1::2]
        c, s = cos[..., : one.shape[-1]], sin[..., : one.shape[-1]]
        return torch.stack([one * c - other * s, other * c + one * s], -1).flatten(-2)

    return turn


@pytest.mark.parametrize(("scale", "cause"), [(1.0, "position"), (1.1, "implementation")])
def test_a_rotation_by_other_operators_is_of_other_positions(
    tmp_path: Path, scale: float, cause: str
) -> None:
    angles = torch.outer(PLACES.float() + 1, torch.linspace(1.0, 0.3, 12).repeat(2))
    wrong = of_neighbours(scale * angles.cos(), scale * angles.sin())

    def halves(y: Tensor) -> Tensor:
        one, other = y.chunk(2, -1)
        return y * angles.cos() + torch.cat([-other, one], -1) * angles.sin()

    sides = [run(tmp_path / n, wrapped(make))[0] for n, make in (("b", halves), ("t", wrong))]
    found = observe(*sides, forward=True)
    assert first(found).cause == cause, found
    # what lays other numbers out is nobody's partner
    assert not any("start" in d.said and "instead of" in d.said for d in found.differences)


def test_what_a_traced_operator_writes_by_a_view_is_nobody_elses(tmp_path: Path) -> None:
    wrong = part("tokens")
    benchmark = run(tmp_path / "b", wrapped(lambda y: y * 1))[0]
    found = observe(benchmark, run(tmp_path / "t", wrapped(lambda y: wrong(y) * 1))[0])
    assert found.differences and not [d for d in found.differences if d.kind == "written"], found


class Gated(nn.Module):
    """Two children whose results may be taken for each other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate, self.up, self.act = nn.Linear(24, 24), nn.Linear(24, 24), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "order":
            up = self.up(x)
            return self.act(self.gate(x)) * up
        one, other = self.gate(x), self.up(x)
        if self.kind == "traded":
            one, other = other, one
        if self.kind == "twice":
            other = one
        if self.kind in ("late", "traded late"):
            one, other = self.gate(x), self.up(x)
            first, second = (one, other) if self.kind == "late" else (other, one)
            return self.act(one) * torch.sigmoid(first) - torch.tanh(second)
        return self.act(one) * other


def gated(kind: str) -> Callable[[Any], None]:
    def change(made: Any) -> None:
        torch.manual_seed(3)
        made.layers[1].norm = Gated(kind)

    return change


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        ("right", "traded", "layout"),
        ("late", "traded late", "layout"),
        ("right", "twice", "implementation"),
        ("right", "order", None),
    ],
)
def test_what_is_given_another_ones_result_is_named(
    tmp_path: Path, right: str, wrong: str, cause: str | None
) -> None:
    sides = [run(tmp_path / name, gated(name))[0] for name in (right, wrong)]
    found = observe(*sides)
    assert (found.first and found.first.cause) == cause, found
    if found.first is not None:
        assert "which the" not in found.first.said, "both sides run all of them"
        assert found.first.kind == "wiring" and "gate made on the" in found.first.said


def turned_over(parts: tuple[int, int]) -> Make:
    return lambda y: y.view(3, 7, *parts).transpose(2, 3).reshape(3, 7, 24) * 1


def heads(tiled: bool) -> Make:
    def spread(y: Tensor) -> Tensor:
        parts = y.view(3, 7, 2, 12)
        parts = parts[:, :, None] if tiled else parts[:, :, :, None]
        return parts.expand(3, 7, 2, 2, 12).reshape(3, 7, 2, 24).sum(2) * 1

    return spread


@pytest.mark.parametrize(
    ("right", "wrong", "cause"),
    [
        (turned_over((4, 6)), turned_over((3, 8)), "layout"),
        (heads(False), heads(True), "layout"),
        (lambda y: y[..., :12] * 1, lambda y: y[..., 12:] * 1, "implementation"),
    ],
)
def test_numbers_that_views_lay_out_otherwise_are_named(
    tmp_path: Path, right: Make, wrong: Make, cause: str
) -> None:
    def padded(make: Make) -> Make:
        return lambda y: nn.functional.pad(make(y).flatten(1), (0, 168))[:, :168].view(3, 7, 24)

    sides = [
        run(tmp_path / name, wrapped(padded(make)))[0]
        for name, make in (("b", right), ("t", wrong))
    ]
    assert first(observe(*sides, forward=True)).cause == cause


def of_scores(make: Make) -> Make:
    def loss(logits: Tensor) -> Tensor:
        return plain_loss(make(logits))

    return loss


def top(logits: Tensor) -> Tensor:
    least = logits.topk(5, -1).values[..., -1:]
    return logits.masked_fill(logits < least, -1e9)


def nucleus(logits: Tensor) -> Tensor:
    chances, order = torch.softmax(logits, -1).sort(-1, descending=True)
    out = (chances.cumsum(-1) - chances > 0.9).scatter(-1, order, chances.cumsum(-1) > 0.9)
    return logits.masked_fill(out, -1e9)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (top, "sampling_semantics"),
        (nucleus, "sampling_semantics"),
        (lambda x: x / 0.7, "sampling_semantics"),
        (lambda x: x * torch.tensor([1.0, 0.5, 2.0]).view(3, 1, 1), "sampling_semantics"),
        (lambda x: x / torch.tensor(0.9).clamp(min=1e-8), "sampling_semantics"),
        (lambda x: torch.cat([x[..., :32], torch.full((3, 7, 8), -1e9)], -1), "sampling_semantics"),
        (lambda x: x.masked_fill(torch.arange(40) == 3, float("-inf")), "sampling_semantics"),
        (lambda x: x.masked_fill(torch.arange(40) == 3, 0.5), "implementation"),
        (lambda x: x * torch.linspace(0.5, 1.5, 40), "implementation"),
        (lambda x: x + x.mean(1, keepdim=True).sort(1).values, "implementation"),
        (lambda x: 3 * torch.tanh(x / 3), "implementation"),
    ],
)
def test_scores_that_are_put_in_order_are_of_another_distribution(
    tmp_path: Path, wrong: Make, cause: str
) -> None:
    sides = [run(tmp_path / name, kind="outputs", module=None, loss=of_scores(make))[0]
             for name, make in (("b", lambda x: x), ("t", wrong))]  # fmt: skip
    assert first(observe(*sides)).cause == cause


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        (lambda x: x[..., :32], "sampling_semantics"),
        (lambda x: x[..., 1:].exp().log(), "sampling_semantics"),
        (lambda x: x.index_select(-1, torch.arange(0, 40, 2)), "sampling_semantics"),
        (lambda x: x[:, :, PLACES.repeat(40)[:40] % 40], "implementation"),
        (
            lambda x: torch.stack([torch.logsumexp(p, -1) for p in x.split(8, -1)], -1) * 1.01,
            "implementation",
        ),
    ],
)
def test_a_normaliser_of_fewer_ids_is_of_another_distribution(
    tmp_path: Path, part: Make, cause: str
) -> None:
    def log_probs(make: Make) -> Make:
        def loss(logits: Tensor) -> Tensor:
            return (logits[..., 3] - torch.logsumexp(make(logits), -1)).mean()

        return loss

    sides = [run(tmp_path / name, kind="outputs", module=None, loss=log_probs(make))[0]
             for name, make in (("b", lambda x: x), ("t", part))]  # fmt: skip
    assert first(observe(*sides)).cause == cause


@pytest.mark.parametrize(
    ("norm", "cause"),
    [
        (lambda x: x[..., :32].exp().sum(-1).log(), "sampling_semantics"),
        (lambda x: x[..., :32].logsumexp(-1), "sampling_semantics"),
        (lambda x: x.exp().sum(-1).log() * 1.01, "implementation"),
        (lambda x: sum(p.exp().sum(-1) for p in x.split(8, -1)).log() * 1.01, "implementation"),
    ],
)
def test_a_normaliser_by_other_operators_is_of_fewer_ids_where_it_is(
    tmp_path: Path, norm: Make, cause: str
) -> None:
    def by_row(x: Tensor) -> Tensor:
        return torch.stack([torch.logsumexp(row, -1) for row in x])

    def loss(make: Make) -> Make:
        return lambda logits: (logits[..., 3] - make(logits)).mean()

    sides = [run(tmp_path / name, kind="outputs", module=None, loss=loss(make))[0]
             for name, make in (("b", by_row), ("t", norm))]  # fmt: skip
    assert first(observe(*sides)).cause == cause


def of_tokens(make: Make) -> Make:
    def loss(logits: Tensor) -> Tensor:
        return (make(torch.logsumexp(logits, -1)) * torch.linspace(0, 1, 21).view(3, 7)).sum()

    return loss


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda x: x.roll(1, 1), "label_or_mask_shift"),
        (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), "label_or_mask_shift"),
        (lambda x: x.flatten().roll(1, 0).view(3, 7), "label_or_mask_shift"),
        (lambda x: x.roll(1, 0), "row_order"),
        (lambda x: x.flatten().roll(14).view(3, 7), "row_order"),
        (lambda x: x.index_select(0, torch.tensor([2, 0, 1])), "row_order"),
    ],
)
def test_around_the_model_it_is_tokens_or_samples_that_are_moved(
    tmp_path: Path, wrong: Make, cause: str
) -> None:
    sides = [run(tmp_path / name, kind="outputs", module=None, loss=of_tokens(make))[0]
             for name, make in (("b", lambda x: x), ("t", wrong))]  # fmt: skip
    assert first(observe(*sides)).cause == cause


def test_steps_that_are_counted_otherwise_are_of_the_optimizer(tmp_path: Path) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    target, _ = run(tmp_path / "t", kind="update", module=None)
    assert observe(benchmark, target).first is None

    def counted(op: Operator) -> Operator:
        if op.name != "aten::_local_scalar_dense":
            return op
        (argument,) = (a for a in op.arguments if a.tensors)
        value = structs.replace(argument.tensors[0], elements=[2.0])
        return structs.replace(op, arguments=[structs.replace(argument, tensors=[value])])

    target.operators = [counted(op) for op in target.operators]
    found = first(observe(benchmark, target))
    assert found.cause == "optimizer"
    assert found.said == "the optimizer counts step 2 on the target and 1 on the benchmark"


def test_a_setting_is_a_constant_of_the_same_optimizer_alone(tmp_path: Path) -> None:
    benchmark, _ = run(tmp_path / "b", kind="update", module=None)
    target, _ = run(tmp_path / "t", kind="update", module=None, lr=3e-2)
    assert first(observe(benchmark, target)).cause == "hyperparameter"
    target.settings[0][0] |= {"lr": 1e-2, "amsgrad": True}
    assert first(observe(benchmark, target)).cause == "optimizer", "another way to compute"


@pytest.mark.parametrize(
    ("take", "cause"),
    [
        (lambda x: float(x.detach().sum()) * 0.0, None),  # taken, and of no effect
        (lambda x: 1e-3 * float(x.detach().abs().max()), "implementation"),
    ],
)
def test_a_number_that_is_taken_off_a_tensor_counts_where_it_is_used(
    tmp_path: Path, take: Callable[[Tensor], float], cause: str | None
) -> None:
    def other(made: Any) -> None:
        norm = made.layers[1].norm
        right = norm.forward
        norm.forward = lambda x: right(x) + take(x)

    sides = [run(tmp_path / "b")[0], run(tmp_path / "t", other)[0]]
    found = observe(*sides)
    assert (found.first and found.first.cause) == cause, found.differences
    assert not any("_local_scalar_dense" in d.said for d in found.differences if d.effective)
