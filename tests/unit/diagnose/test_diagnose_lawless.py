"""Differences that follow no law: none may be given a cause, whatever module they are in."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from rlprobe.diagnose.diagnosis import UNKNOWN
from rlprobe.stages import ACTOR_UPDATE, LOG_PROB
from tests.sampled import every_second
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

Array = np.ndarray
Change = Callable[[Array, np.random.Generator], Array]
F32 = np.float32
LAYER = "model.layers.1"
MODULES = (
    f"{LAYER}.input_layernorm", f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.v_proj",
    f"{LAYER}.self_attn.o_proj", f"{LAYER}.self_attn", f"{LAYER}.mlp.gate_proj",
    f"{LAYER}.mlp.act_fn", f"{LAYER}.mlp.down_proj", f"{LAYER}.mlp", "model.norm", "lm_head",
    "model.layers.0.mlp.up_proj",
)  # fmt: skip


def noise(size: float) -> Change:
    return lambda y, r: y + size * np.abs(y).mean() * r.standard_normal(y.shape)


def dropout(y: Array, r: np.random.Generator) -> Array:
    return np.where(r.random(y.shape) < 0.1, 0.0, y / 0.9)


def fp8(y: Array, _: np.random.Generator) -> Array:
    """Three bits behind the leading one: e4m3 without its range."""
    mantissa, exponent = np.frexp(y)
    return np.ldexp(np.round(mantissa * 16) / 16, exponent)


def int8(y: Array, _: np.random.Generator) -> Array:
    scale = np.abs(y).max() / 127
    return np.round(y / scale) * scale


def bias(y: Array, r: np.random.Generator) -> Array:
    return y + 0.05 * r.standard_normal(y.shape[-1])


def soft_cap(y: Array, _: np.random.Generator) -> Array:
    cap = 2 * np.abs(y).max()
    return cap * np.tanh(y / cap)


def stale(y: Array, _: np.random.Generator) -> Array:
    """The first row is the last call's."""
    z = y.copy()
    z[0] = 0.7 * y[-1] + 0.3 * y[0]
    return z


def of_samples(y: Array, r: np.random.Generator) -> Array:
    return y + 0.1 * r.standard_normal((len(y),) + (1,) * (y.ndim - 1))


def of_tokens(y: Array, r: np.random.Generator) -> Array:
    return y * (1 + 0.1 * r.standard_normal((*y.shape[:-1], 1)))


def of_channels(y: Array, r: np.random.Generator) -> Array:
    return y * (1 + 0.05 * r.standard_normal(y.shape[-1]))


def signs(y: Array, r: np.random.Generator) -> Array:
    return np.where(r.random(y.shape) < 0.05, -y, y)


def few_tokens(y: Array, r: np.random.Generator) -> Array:
    return np.where(r.random((*y.shape[:-1], 1)) < 0.3, 1.3 * y + 0.01, y)


def small_lost(y: Array, _: np.random.Generator) -> Array:
    return np.where(np.abs(y) < 0.3 * np.abs(y).mean(), 0.0, y)


def leak(y: Array, _: np.random.Generator) -> Array:
    return y + 0.2 * np.roll(y, 1, axis=-1)


def part_scaled(y: Array, _: np.random.Generator) -> Array:
    z = y.copy()
    z[..., : y.shape[-1] // 2] *= 1.1
    return z


def truncated(y: Array, _: np.random.Generator) -> Array:
    """bf16 by cutting off, with one bit more."""
    bits = y.astype(F32).view(np.uint32) & np.uint32(0xFFFF8000)
    return bits.view(F32)


CHANGES: dict[str, Change] = {
    "noise of a tenth": noise(0.1), "noise of a thousandth": noise(1e-3), "dropout": dropout,
    "fp8": fp8, "int8": int8, "bias": bias, "soft cap": soft_cap, "stale": stale,
    "offsets of samples": of_samples, "factors of tokens": of_tokens,
    "factors of channels": of_channels, "signs": signs, "few tokens": few_tokens,
    "small values lost": small_lost, "leak": leak, "part scaled": part_scaled,
    "cut off": truncated,
}  # fmt: skip


def planted(change: Change, seed: int) -> Callable[[Array], Array]:
    generator = np.random.default_rng(seed)
    return lambda y: change(y.astype(np.float64), generator).astype(F32)


#: Every change in a module that is drawn.
FAMILY = [
    (name, MODULES[int(np.random.default_rng(7 * n).integers(len(MODULES)))])
    for n, name in enumerate(CHANGES)
]


@pytest.mark.parametrize(("name", "module"), every_second(FAMILY), ids=lambda part: part)
def test_no_cause_is_asserted_of_a_module(align: Align, name: str, module: str) -> None:
    faults = {f"output {module}": planted(CHANGES[name], len(name))}
    found = align(Device(split=True, faults=faults, stage=LOG_PROB), repeat=False).diagnose()
    assert found.verdict == "diverged" and found.first is not None
    assert found.first.module == module
    assert found.cause is not None and found.cause.known == UNKNOWN, found.cause


#: Two changes on top of each other.
PAIRS = list(pairwise(CHANGES))[::8]


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("answers", LOG_PROB),
        (f"values {LAYER}.self_attn", LOG_PROB),
        ("loss gradient", ACTOR_UPDATE),
        (f"backward {LAYER}.mlp.down_proj", ACTOR_UPDATE),
        (f"backward {LAYER}.mlp.act_fn", ACTOR_UPDATE),
        (f"weight gradient {LAYER}.mlp.up_proj.weight", ACTOR_UPDATE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_no_cause_is_asserted_elsewhere(
    align: Align, place: str, stage: str, pair: tuple[str, str]
) -> None:
    first, second = (planted(CHANGES[name], len(place)) for name in pair)
    faults = {place: lambda y: second(first(y))}
    found = align(Device(split=True, faults=faults, stage=stage), repeat=False).diagnose()
    assert found.verdict == "diverged"
    assert found.cause is not None and found.cause.known == UNKNOWN, found.cause
