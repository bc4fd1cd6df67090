"""Operators whose kernels make other numbers, where what they are given differs by noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402

from rlprobe.capture.trace.operators import Operators  # noqa: E402
from rlprobe.capture.trace.values import Values  # noqa: E402
from rlprobe.refine import conditioning  # noqa: E402
from rlprobe.refine.both import exceeds  # noqa: E402
from rlprobe.refine.bounds import Bounds  # noqa: E402
from rlprobe.refine.observe import observe  # noqa: E402
from rlprobe.refine.trace import Operator, Trace, error  # noqa: E402

pytestmark = pytest.mark.slow

Make = Callable[..., Any]
LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.full((8, 8), LOWEST).triu(1)
IDS = torch.tensor([[1, 1, 1, 0, 5, 5, 1, 3], [2, 1, 1, 1, 1, 1, 1, 1]])
#: Far beyond round-off of one operator, as after many layers.
NOISE = 1e-4


def traced(make: Make, given: list[Tensor]) -> list[Operator]:
    """The operators of a function, as a trace has them."""
    lines: list[Any] = []
    values = Values(Path("unused"), "x", lambda _: False, lambda: False)

    def write(line: Any) -> bool:
        lines.append(line)
        return True

    with Operators(values, lambda: True, write), torch.no_grad():
        make(*given)
    return [msgspec.convert(line, Operator) for line in lines]


def numbers(noise: float, seed: int = 0) -> list[Tensor]:
    """Scores, gradients and positive numbers, which noise has moved."""
    generator = torch.Generator().manual_seed(seed)
    other = torch.Generator().manual_seed(seed + 100)

    def drawn(size: float) -> Tensor:
        plain = size * torch.randn(2, 8, 8, generator=generator)
        return plain * (1 + noise * torch.randn(2, 8, 8, generator=other))

    x, y = drawn(3.0), drawn(0.01)
    return [x, y, drawn(1.0).abs() + 0.1]


def _in_place(name: str, value: float) -> Make:
    def make(x: Tensor, y: Tensor, z: Tensor) -> None:
        getattr(torch.zeros_like(z), name)(y, z if name == "addcdiv_" else y, value=value)
        getattr(x.clone(), name)(y, z, value=value)

    return make


def _lists(x: Tensor, y: Tensor, z: Tensor) -> None:
    one, other = [x.clone(), y.clone()], [y, x]
    torch._foreach_mul_(one, 0.9)
    torch._foreach_lerp_(one, other, 0.1)
    torch._foreach_addcmul_(one, other, other, 0.001)
    torch._foreach_addcdiv_(one, other, [z, z], [-0.1, -0.2])
    torch._foreach_norm(one)


MAKES: dict[str, Make] = {
    "sums": lambda x, y, z: (x + y, x - 0.99 * x, torch.sub(x, y, alpha=3), x.sum(-1), x.mean()),
    "products": lambda x, y, z: (x * y, y * y, x * 7, x / z, y / 3, x.pow(2), z.rsqrt(), z.sqrt()),
    "matrices": lambda x, y, z: (x @ y, torch.baddbmm(z, x, y, alpha=2), x[0] @ y[0],
                                 torch.addmm(z[0, 0], x[0], z[1]), functional.linear(x, z[0])),
    "masked scores": lambda x, y, z: torch.softmax(x + CAUSAL, -1) @ y,
    "filled scores": lambda x, y, z: torch.softmax(x.masked_fill(CAUSAL < 0, -1e4), -1),
    "log-probs": lambda x, y, z: (torch.log_softmax(x, -1), torch.logsumexp(100 * x, -1)),
    "activations": lambda x, y, z: (functional.silu(x), functional.gelu(x), x.tanh(), x.sigmoid(),
                                    x.exp(), z.log(), x.sin(), x.clamp(-1, 1)),
    "gradients": lambda x, y, z: (
        torch.ops.aten.silu_backward(y, x), torch.ops.aten.gelu_backward(y, x),
        torch.ops.aten.tanh_backward(y, x.tanh()), torch.ops.aten.sigmoid_backward(y, x.sigmoid()),
        torch.ops.aten._softmax_backward_data(y, torch.softmax(x, -1), -1, torch.float32),
        torch.ops.aten._log_softmax_backward_data(y, torch.log_softmax(x, -1), -1, torch.float32)),
    "rows": lambda x, y, z: (
        torch.ops.aten.embedding_dense_backward(y, IDS, 9, -1, False),
        torch.zeros(9, 8).index_add(0, IDS[0], y[0])),
    "views": lambda x, y, z: (torch.cat([x, y]), x.transpose(1, 2).contiguous(), x[:, 1:3],
                              x[..., None].expand(2, 8, 8, 5).clone(), torch.stack([x, y])),
    "means": lambda x, y, z: (z.mean(-1, keepdim=True), x.square().mean(-1)),
    "second moments": _in_place("addcmul_", 0.001),
    "steps": _in_place("addcdiv_", -0.1),
    "lists": _lists,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKES)
def test_what_correct_kernels_make_of_noise_stays_within_its_bound(name: str) -> None:
    told = 0
    for seed in range(3):
        sides = [traced(MAKES[name], numbers(noise, seed)) for noise in (0.0, NOISE)]
        bounds = Bounds()
        for b, t in zip(*sides, strict=True):
            found = bounds.of(b, t)
            if found is None:
                continue
            told += 1
            assert not exceeds(b, t, found, conditioning.factor(b)), (b.said, found)
            for one, other, most in zip(b.outputs, t.outputs, found, strict=True):
                size = error(one, other)
                if size is not None and size < float("inf"):
                    # a sketch is some percent uncertain
                    assert size * (one.norm or 1.0) <= 1.5 * most + 1e-5 * (one.norm or 1.0), b.said
    assert told


@contextmanager
def kernel(name: str, wrong: Make) -> Iterator[None]:
    """Another kernel of an operator, as another device has it."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, wrong, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _soft(x: Tensor, dim: int) -> Tensor:
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def _half(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _rows_lost(d: Tensor, ids: Tensor, count: int, padding: int, scale: bool) -> Tensor:
    made = torch.zeros(count, d.shape[-1])
    return made.index_add_(0, ids.flatten()[:-1], d.flatten(0, -2)[:-1])


def _cut(x: Tensor) -> Tensor:
    return (x.view(torch.int32) & -65536).view(torch.float32)


WRONG: dict[str, tuple[str, str, Make]] = {
    "masked softmax in bf16": ("masked scores", "_softmax", lambda x, d, _: _half(_soft(x, d))),
    "filled softmax in bf16": ("filled scores", "_softmax", lambda x, d, _: _half(_soft(x, d))),
    "masked softmax without a shift": (
        "masked scores", "_softmax", lambda x, d, _: _soft(x, d) * 1.001),
    "second moment in bf16": (
        "second moments", "addcmul_",
        lambda s, a, b, *, value=1: s.copy_(_half(s + value * a * b))),
    "step in bf16": ("steps", "addcdiv_",
                     lambda s, a, b, *, value=1: s.copy_(_half(s + value * a / b))),
    "rows lost": ("rows", "embedding_dense_backward", _rows_lost),
    "logsumexp without a tail": (
        "log-probs", "logsumexp", lambda x, d, keepdim=False: x[..., :4].amax(-1)),
    "products of bf16": ("matrices", "mm", lambda a, b: torch.addmm(
        torch.zeros(b.shape[1]), _half(_half(a)), 1.01 * b)),
    "sigmoid's gradient crude": ("gradients", "sigmoid_backward", lambda d, o: d * o),
    "silu crude": ("activations", "silu", lambda x: x * torch.clamp(x / 6 + 0.5, 0, 1)),
    "mean in bf16": ("means", "mean.dim", lambda x, d, keep=False, *, dtype=None: _half(
        x.sum(d, keep) / x.shape[-1])),
    "square in fp16": ("products", "pow.Tensor_Scalar", lambda x, n: (x * x).half().float()),
    "root in bf16, in fp64 else": ("products", "rsqrt", lambda x: _half(1 / x.sqrt())),
    "tanh cut off to bf16": ("activations", "tanh", lambda x: _cut(torch.sinh(x) / torch.cosh(x))),
    # numbers of bf16, further off than a rounding makes
    "sine in bf16 and doubled": ("activations", "sin", lambda x: 2 * _half(torch.cos(x - 1.5708))),
    "exponents dead": ("activations", "exp", lambda x: torch.zeros_like(x)),
    # a sum that is rounded within, of which the result is not: nothing tells
    "softmax's gradient sums in bf16": (
        "gradients", "_softmax_backward_data",
        lambda d, y, _dim, _type: (d - _half((d * y).sum(-1, keepdim=True))) * y),
}  # fmt: skip
#: Those of which every result is a number of a shorter format, and no further off.
ROUNDED = {
    "masked softmax in bf16": "bfloat16", "filled softmax in bf16": "bfloat16",
    "second moment in bf16": "bfloat16", "step in bf16": "bfloat16", "mean in bf16": "bfloat16",
    "square in fp16": "float16", "root in bf16, in fp64 else": "bfloat16",
    "tanh cut off to bf16": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_kernel_that_makes_other_numbers_of_about_the_same_is_named(name: str) -> None:
    make, operator, wrong = WRONG[name]
    noise = NOISE / 10
    right = Trace("module", None, "cpu", {}, traced(MAKES[make], numbers(0.0)))
    noisy = Trace("module", None, "cpu", {}, traced(MAKES[make], numbers(noise)))
    assert observe(right, noisy, 2 * noise, 4 * noise).first is None
    with kernel(operator, wrong):
        target = Trace("module", None, "cpu", {}, traced(MAKES[make], numbers(noise)))
    first = observe(right, target, 2 * noise, 4 * noise).first
    assert first is not None and first.of.startswith(f"aten::{operator} ("), first
    cause = "rounding_order" if name in ROUNDED else "implementation"
    assert (first.cause, first.kind) == (cause, "kernel"), first
    said = f"on the target alone, what it makes are {ROUNDED.get(name)} numbers"
    assert (said in first.said) is (name in ROUNDED)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_benchmark_that_rounds_is_named_as_well(name: str) -> None:
    make, operator, wrong = WRONG[name]
    target = Trace("module", None, "cpu", {}, traced(MAKES[make], numbers(0.0)))
    with kernel(operator, wrong):
        benchmark = Trace("module", None, "cpu", {}, traced(MAKES[make], numbers(0.0)))
    first = observe(benchmark, target, 1e-6, 1e-6).first
    assert first is not None and first.cause == "rounding_order", first
    assert f"on the benchmark alone, what it makes are {ROUNDED[name]} numbers" in first.said


@pytest.mark.parametrize(
    ("make", "bits"),
    [
        (lambda x: x, 24),
        (lambda x: x.bfloat16().float(), 8),
        (lambda x: x.half().float(), 11),
        (lambda x: x.double() / 3, 53),
        (lambda x: x.half().double(), 11),
        (lambda x: x.bfloat16().float().masked_fill(x > 0, float("nan")), 8),
        (lambda x: torch.cat([x.bfloat16().float().ravel(), x.ravel()[:1]]), 24),
        (lambda x: x.bfloat16().float().mT, 8),
        (lambda x: x.bfloat16(), None),
        (lambda x: torch.arange(9), None),
    ],
)
def test_the_format_that_holds_every_element_is_recorded(make: Make, bits: int | None) -> None:
    from rlprobe.capture.trace.values import content

    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    assert content(make(x)).get("bits") == bits


def test_what_nothing_bounds_is_said_to_be_open() -> None:
    sides = [
        Trace("module", None, "cpu", {}, traced(lambda x, y, z: z.tan(), numbers(noise)))
        for noise in (0.0, NOISE)
    ]
    found = observe(sides[0], sides[1], 1.0, 1.0)
    assert [step.target.name for step in found.untold] == ["aten::tan"] and found.first is None


#: Kernels that are given numbers which are apart already, as of gradients that were not reduced.
APART: dict[str, tuple[str, str, Make]] = {
    "norm of the ranks' norms": (
        "norm", "linalg_vector_norm", lambda x, *_, **__: 1.3 * x.square().sum().sqrt()),
    "product": ("product", "mm", lambda a, b: torch.addmm(torch.zeros(b.shape[1]), a, 3 * b)),
    "root": ("root", "sqrt", lambda x: 2 * x.pow(0.5)),
}  # fmt: skip
_OF_APART: dict[str, Make] = {
    "norm": lambda x, y, z: torch.linalg.vector_norm(x.neg()),
    "product": lambda x, y, z: x[0] @ x[1],
    "root": lambda x, y, z: z.abs().sqrt(),
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("noise", [0.8, 0.1])
def test_no_kernel_is_blamed_for_what_is_apart_already(name: str, noise: float) -> None:
    make, operator, wrong = APART[name]
    right = Trace("module", None, "cpu", {}, traced(_OF_APART[make], numbers(0.0)))
    with kernel(operator, wrong):
        target = Trace("module", None, "cpu", {}, traced(_OF_APART[make], numbers(noise)))
        same = Trace("module", None, "cpu", {}, traced(_OF_APART[make], numbers(0.0)))
    found = observe(right, target, 1e-5, 3e-5)
    assert not any(d.kind == "kernel" for d in found.differences), found
    assert [step for step in found.untold if step.target.name.startswith(f"aten::{operator}")]
    # given the same, it is
    blamed = observe(right, same, 1e-5, 3e-5).first
    assert blamed is not None and blamed.kind == "kernel"
