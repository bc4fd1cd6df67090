"""How well does a sketch say how far apart two tensors are, on every shape of error?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from rlprobe import sketch as definition  # noqa: E402
from rlprobe.capture.light import sketches  # noqa: E402
from rlprobe.capture.light.sketches import accumulation_floor, sketch, sketch_shard  # noqa: E402
from rlprobe.errors import DumpError  # noqa: E402
from rlprobe.sketch_floors import ACCUMULATION, SHARDED, UNSEEN  # noqa: E402

T, H = 128, 256  # 256 is divisible by 64 and not by 61


def generator(seed: int = 0) -> Any:
    return torch.Generator().manual_seed(seed)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "_floors", {})


def error_of(values: Tensor) -> float:
    exact = sketch(values.double()).double()
    return float((sketch(values).double() - exact).norm() / values.double().norm())


def test_the_floor_of_this_device_bounds_tensors_it_was_not_measured_on(unmeasured: None) -> None:
    floor = accumulation_floor("cpu")
    for count in (1000, 1 << 20, 3_000_000):
        for shift in (0.0, 1.0, 100.0):
            values = random(count, seed=1) + shift
            assert 0 < error_of(values) <= floor, (count, shift)
    # fp32 products and fp64 sums: no more than two units in the last place of fp32
    assert floor <= 2 * torch.finfo(torch.float32).eps


def test_the_floor_is_that_of_the_device_and_measured_once(
    unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that sums in fp16 has a floor a thousand times as high, and it holds there too."""

    def coarse(tensor: Tensor, offset: int = 0) -> Tensor:
        found = sketch(tensor, offset)
        return found if tensor.dtype == torch.float64 else found.half().float()

    good = accumulation_floor("cpu", 61_000)
    monkeypatch.setattr(sketches, "sketch", coarse)
    assert accumulation_floor("cpu", 61_000) == good, "it is measured once"
    sketches._floors.clear()
    bad = accumulation_floor("cpu", 61_000)
    assert 300 * good < bad < 1e-3
    values = random(61_000, seed=2)
    exact = sketch(values.double()).double()
    assert float((coarse(values).double() - exact).norm() / values.norm()) <= bad


@pytest.mark.parametrize("count", [1, 60, 61, 62, 5000, 131_072, 200_001, 600_000, 1_000_003])
def test_a_device_sketch_is_the_reference_sketch(count: int) -> None:
    values = random(count)
    expected = definition.sketch(values.numpy())
    found = sketch(values).numpy()
    norm = float(values.norm())
    assert np.linalg.norm(found - expected) <= ACCUMULATION * norm


@pytest.mark.parametrize(("count", "seed"), [(100_000, 27), (61_000, 31), (100_000, 14)])
def test_the_default_floor_holds_where_sums_lose_most(count: int, seed: int) -> None:
    values = torch.randn(count, generator=generator(seed))
    assert error_of(values) <= ACCUMULATION


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype(dtype: Any) -> None:
    values = (random(7, 333) * 3).to(dtype)
    wide = values.double()
    expected = definition.sketch(wide.numpy())
    bound = ACCUMULATION * float(wide.norm())
    assert np.linalg.norm(sketch(values).numpy() - expected) <= bound


def test_strides_do_not_matter() -> None:
    values = random(40, 50)
    transposed = values.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert torch.equal(sketch(values), sketch(transposed))


def test_a_buffer_kept_for_a_size_holds_nothing_of_the_tensor_before() -> None:
    first, second = random(100, seed=1), random(100, seed=2)
    expected = definition.sketch(second.numpy())
    sketch(first)
    assert np.allclose(sketch(second).numpy(), expected, atol=1e-5)
    kept = sketch(first)
    copy = kept.clone()
    sketch(second)
    assert torch.equal(kept, copy), "a result must not live in the buffer"


def test_one_thread_and_many_agree_to_the_floor() -> None:
    values = random(3_000_000)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = sketch(values)
        torch.set_num_threads(4)
        many = sketch(values)
    finally:
        torch.set_num_threads(threads)
    assert float((one - many).norm()) <= ACCUMULATION * float(values.norm())


def one_channel() -> Tensor:
    return torch.zeros(T, H).index_copy(1, torch.tensor([9]), random(T, 1))


def one_head() -> Tensor:
    difference = torch.zeros(T, H)
    difference[:, 64:128] = random(T, 64)
    return difference


def one_token() -> Tensor:
    return torch.zeros(T, H).index_copy(0, torch.tensor([7]), random(1, H))


ERRORS: dict[str, Callable[[], Tensor]] = {
    "one channel": one_channel,
    "one head": one_head,
    "one token": one_token,
    "rank one": lambda: random(T, 1) * random(1, H, seed=2),
    "a constant shift": lambda: torch.ones(T, H),
    "a bias row": lambda: random(1, H).expand(T, H),
    "dense noise": lambda: random(T, H),
    "permuted tokens": lambda: (
        random(T, H)[torch.randperm(T, generator=generator())] - random(T, H)
    ),
    "permuted channels": lambda: (
        random(T, H)[:, torch.randperm(H, generator=generator())] - random(T, H)
    ),
    "bf16 rounding": lambda: random(T, H).bfloat16().float() - random(T, H),
}


@pytest.mark.parametrize("kind", list(ERRORS))
@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0])
def test_the_estimate_is_within_its_bound(kind: str, size: float) -> None:
    """Over 12 places in a longer tensor: right on average, and never beyond 4 deviations."""
    base = random(T, H, seed=5)
    difference = ERRORS[kind]()
    difference = difference * (size * base.norm() / difference.norm())
    ratios = []
    for place in range(12):
        offset = place * 100_003
        both = sketch(base, offset).numpy(), sketch(base + difference, offset).numpy()
        found = definition.distance(*both) / float(base.norm())
        true = float(((base + difference).double() - base.double()).norm() / base.double().norm())
        assert found > UNSEEN
        assert abs(found - true) < 4 * definition.deviation() * true + UNSEEN
        ratios.append(found / true)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.08)
    assert np.std(ratios) < 0.14


def test_a_single_wrong_element_is_exact() -> None:
    base = random(T, H)
    other = base.clone()
    other[3, 5] += 1.0
    found = definition.distance(sketch(base).numpy(), sketch(other).numpy())
    assert found == pytest.approx(1.0, rel=1e-4)


def test_a_permutation_that_statistics_cannot_see() -> None:
    base = random(T, H)
    other = base.flip(0)
    assert (base.max(), base.min()) == (other.max(), other.min())
    found = definition.distance(sketch(base).numpy(), sketch(other).numpy())
    assert found / float(base.norm()) == pytest.approx(2**0.5, rel=0.3)


def test_many_pairs_are_as_far_apart_as_each_of_them() -> None:
    benchmark, target = (
        np.stack([sketch(random(T, H, seed=n + own)).numpy() for n in range(5)]) for own in (0, 3)
    )
    each = [definition.distance(b, t) for b, t in zip(benchmark, target, strict=True)]
    assert definition.distances(benchmark, target) == pytest.approx(each, rel=1e-14)
    nothing = np.zeros_like(target)
    assert definition.distances(nothing, target) == pytest.approx(definition.norms(target))


def test_what_is_summed_in_another_order_lies_below_the_floor_and_a_real_difference_above() -> None:
    base = random(T, H)
    norm = float(base.norm())
    own = sketch(base).numpy()
    # the reference sums in fp64: another device, as far as a sum is concerned
    assert definition.distance(own, definition.sketch(base.numpy())) <= UNSEEN * norm
    assert definition.distance(own, sketch(base * (1 + 1e-6)).numpy()) > UNSEEN * norm


@pytest.mark.parametrize("parts", [2, 64])
def test_sums_of_shards_agree_to_their_floor(parts: int) -> None:
    """Each side cut in its own way, every shard summed and rounded for itself."""
    whole = random(parts * 1000 + 17)
    sides = []
    for count in (1, parts):
        total, start = np.zeros(61), 0
        for part in whole.chunk(count):
            total += sketch(part.contiguous(), start).double().numpy()
            start += part.numel()
        sides.append(total)
    assert definition.distance(*sides) <= SHARDED * float(whole.norm())
    wrong = sketch(whole * (1 + 1e-5)).numpy()
    assert definition.distance(sides[0], wrong) > SHARDED * float(whole.norm())


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", [2, 3])
def test_sketches_of_shards_add_up(dim: int, parts: int) -> None:
    whole = random(12, 7, 30)
    position, total = 0, torch.zeros(61)
    for part in whole.chunk(parts, dim):
        total += sketch_shard(part.contiguous(), whole.shape, dim, position)
        position += part.shape[dim]
    assert torch.allclose(total, sketch(whole), atol=1e-4)


def test_stretches_of_a_flat_parameter_add_up() -> None:
    whole = random(1000)
    total = sketch(whole[:333]) + sketch(whole[333:], 333)
    assert torch.allclose(total, sketch(whole), atol=1e-4)


def test_signs_beyond_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor longer than the table of signs: blocks are flipped, the reference agrees."""
    for module in (definition, sketches):
        monkeypatch.setattr(module, "PERIOD", 1000)
    values = random(7321)
    expected = definition.sketch(values.numpy())
    assert np.allclose(sketches._general(values, 0).numpy(), expected, atol=1e-4)
    halves = sketches._general(values[:2500], 0) + sketches._general(values[2500:], 2500)
    assert np.allclose(halves.numpy(), expected, atol=1e-4)
    flips = {definition.block_sign(block) for block in range(20)}
    assert flips == {-1, 1} and definition.block_sign(0) == 1


def test_signs_are_balanced_and_fixed() -> None:
    signs = definition.base_signs(1 << 16)
    assert set(np.unique(signs)) == {-1, 1}
    assert abs(float(signs.mean())) < 0.01
    # Dumps made years apart must agree: the table is part of the format.
    assert signs[:16].tolist() == definition.signs(0, 16).tolist()
    digest = np.packbits(signs[:64] > 0).tobytes().hex()
    assert digest == "5ccb2ca3068a2eee"


def test_an_encoded_sketch_comes_back() -> None:
    values = sketch(random(500)).numpy()
    text = definition.encode(values)
    assert text.startswith("b64:") and text[4] not in "=+-%@"
    assert np.array_equal(definition.decode(text), values)


@pytest.mark.parametrize("text", ["", "b64:", "b64:AAAA", "b64:***", "AAAA", "b64:" + "A" * 400])
def test_a_damaged_sketch_is_refused(text: str) -> None:
    with pytest.raises(DumpError, match="sketch"):
        definition.decode(text)


@pytest.mark.parametrize("count", [188, 1 << 16, 3 << 20])
def test_a_size_first_seen_in_inference_mode_is_sketched_outside_of_it(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """An engine generates in inference mode, in the process that trains afterwards."""
    for name, empty in (("_buffers", sketches._Buffers()), ("_signs", {}), ("_rows", [])):
        monkeypatch.setattr(sketches, name, empty)
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    with torch.inference_mode():
        inside = sketch(x * 1)
    assert sketch(x).tolist() == inside.tolist()
