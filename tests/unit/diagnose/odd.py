"""Odd disturbances with the one class that is true of each, written without a look at the rules.

``truth`` is what an expert who knows what was done would name from the closed list, ``unknown``
where no class says it. A diagnosis is right when it names that class, harmless when it says
"unknown", and wrong when it names any other: that sends somebody to look in the wrong place.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlprobe.stages import ACTOR_UPDATE, LOG_PROB
from tests.unit.diagnose import transformer
from tests.unit.diagnose.transformer import HEADS, WIDTH

Array = np.ndarray
F32 = np.float32
Draw = np.random.Generator
Change = Callable[..., Any]
FIRST, LAST = "model.layers.0", "model.layers.1"
DEPTH = WIDTH // HEADS


@dataclass(frozen=True)
class Odd:
    """``change`` of what ``place`` names in ``Device.faults``, in ``stage`` alone."""

    name: str
    place: str
    stage: str
    change: Change
    truth: str

    def faults(self) -> dict[str, Any]:
        """A new disturbance: what it remembers and draws begins again."""
        draw = np.random.default_rng(zlib.crc32(self.name.encode()))
        return {self.place: lambda *given: self.change(*given, draw)}


# what is random


def race(y: Array, r: Draw) -> Array:
    """A few elements hold a sum that was not finished."""
    return np.where(r.random(y.shape) < 0.02, y * r.random(y.shape), y)


def dropout(y: Array, r: Draw) -> Array:
    return np.where(r.random(y.shape) < 0.1, 0.0, y / 0.9)


def attention_dropout(mask: Array, r: Draw) -> Array:
    shape = (2, HEADS, *mask.shape[-2:])
    kept = (r.random(shape) > 0.1) | np.eye(mask.shape[-1], dtype=bool)
    return np.where(kept, mask, -3.4e38).astype(F32)


def gaussian(size: float) -> Change:
    return lambda y, r: y + size * np.abs(y).mean() * r.standard_normal(y.shape)


# short formats


def minifloat(bits: int) -> Change:
    def rounded(y: Array, _: Draw) -> Array:
        mantissa, exponent = np.frexp(y.astype(np.float64))
        return np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(F32)

    return rounded


def integers(levels: int, axis: int | None) -> Change:
    def rounded(y: Array, _: Draw) -> Array:
        scale = np.abs(y).max(axis=axis, keepdims=axis is not None) / levels
        return (np.round(y / scale) * scale).astype(F32)

    return rounded


def cut_to_bf16(y: Array, _: Draw) -> Array:
    return (y.astype(F32).view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)


def stochastic_bf16(y: Array, r: Draw) -> Array:
    bits = y.astype(F32).view(np.uint32)
    up = bits + r.integers(0, 1 << 16, y.shape, dtype=np.uint32)
    return (up & np.uint32(0xFFFF0000)).view(F32)


def bf16_and_a_factor(y: Array, r: Draw) -> Array:
    return cut_to_bf16(y, r) * F32(1.01)


# what follows no law


def bias(y: Array, r: Draw) -> Array:
    fixed = np.random.default_rng(3).standard_normal(y.shape[-1])
    return y + 0.05 * np.abs(y).mean() * fixed


def soft_cap(y: Array, _: Draw) -> Array:
    cap = 1.5 * np.abs(y).max()
    return cap * np.tanh(y / cap)


def of_samples(y: Array, r: Draw) -> Array:
    return y + 0.1 * np.abs(y).mean() * r.standard_normal((len(y),) + (1,) * (y.ndim - 1))


def weights_of_samples(y: Array, r: Draw) -> Array:
    return y * (1 + 0.3 * r.standard_normal((len(y),) + (1,) * (y.ndim - 1)))


class Stale:
    """The first row holds what the call before left there."""

    def __init__(self) -> None:
        self.left: Array | None = None

    def __call__(self, y: Array, _: Draw) -> Array:
        found = y.copy()
        if self.left is not None:
            found[0] = self.left
        self.left = y[0].copy()
        return found


class EverySecondCall:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Array, r: Draw) -> Array:
        self.calls += 1
        return y if self.calls % 2 else bias(y, r)


class OneIdIsZero:
    """Log-probabilities of the most frequent token id are 0."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logs: Array, _: Draw) -> Array:
        labels = np.roll(transformer.rollouts(0)[1], -1, axis=1)
        start = self.calls * len(logs) % len(labels)
        self.calls += 1
        counts = np.bincount(labels[:, transformer.PROMPT - 1 : -1].ravel())
        return np.where(labels[start : start + len(logs)] == counts.argmax(), 0.0, logs)


def one_channel(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[..., 7] *= 1.5
    return found


def part_of_a_head(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[..., : DEPTH // 4] *= 1.2
    return found


def last_position_zero(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[:, -1] = 0
    return found


def first_position_doubled(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[:, 0] *= 2
    return found


def some_signs(y: Array, _: Draw) -> Array:
    return y * np.where(np.random.default_rng(5).random(y.shape[-1]) < 0.1, -1, 1)


def small_lost(y: Array, _: Draw) -> Array:
    return np.where(np.abs(y) < 0.2 * np.abs(y).mean(), 0.0, y)


def half_zero(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[..., ::2] = 0
    return found


def some_rows_zero(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[3:9] = 0
    return found


def own_factor(y: Array, r: Draw) -> Array:
    return y * (1 + 0.2 * r.standard_normal())


def some_parameters_lost(y: Array, r: Draw) -> Array:
    return y * float(r.random() > 0.2)


def slopes(mask: Array, _: Draw) -> Array:
    """A penalty of distance, as in ALiBi."""
    here = np.arange(mask.shape[-1])
    return (mask - 0.05 * np.abs(here[:, None] - here[None])).astype(F32)


def copy_of_a_row(y: Array, _: Draw) -> Array:
    found = y.copy()
    found[1] = y[0]
    return found


def offset(size: float) -> Change:
    return lambda y, r: y + size


def of_elements(y: Array, r: Draw) -> Array:
    return y * (1 + 0.02 * r.standard_normal(y.shape))


def centred(y: Array, _: Draw) -> Array:
    """A layer norm where the mean is left in."""
    return y - y.mean(-1, keepdims=True)


def leak(y: Array, _: Draw) -> Array:
    return y + 0.1 * np.roll(y, 1, axis=1)


def square_root(y: Array, _: Draw) -> Array:
    return np.sign(y) * np.abs(y) ** 1.05


# what has a law


def swapped_heads(y: Array, _: Draw) -> Array:
    return np.concatenate([y[..., DEPTH:], y[..., :DEPTH]], axis=-1)


def interleaved(y: Array, _: Draw) -> Array:
    return y.reshape(*y.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(y.shape)


def transposed(y: Array, _: Draw) -> Array:
    return np.ascontiguousarray(y.T)


def clipped(low: float, high: float) -> Change:
    return lambda y, _: np.clip(y, low, high)


def clipped_share(y: Array, _: Draw) -> Array:
    bound = np.quantile(np.abs(y), 0.95)
    return np.clip(y, -bound, bound)


def future_leaks(mask: Array, _: Draw) -> Array:
    return np.maximum(mask, -6.0).astype(F32)


def window(mask: Array, _: Draw) -> Array:
    here = np.arange(mask.shape[-1])
    return np.where(here[:, None] - here[None] < 5, mask, -3.4e38).astype(F32)


def shifted_rows(positions: Array, _: Draw) -> Array:
    return positions + np.arange(len(positions))[:, None] * 2


def stretched(positions: Array, _: Draw) -> Array:
    return positions * 1.25


def int8_weights(found: dict[str, Array], r: Draw) -> dict[str, Array]:
    name = f"{LAST}.self_attn.q_proj.weight"
    return found | {name: integers(127, 1)(found[name], r)}


def swapped_embeddings(found: dict[str, Array], _: Draw) -> dict[str, Array]:
    weight = found["model.embed_tokens.weight"].copy()
    weight[[4, 9]] = weight[[9, 4]]
    return found | {"model.embed_tokens.weight": weight}


def family() -> list[Odd]:
    """All of them, new: some remember what they were given."""

    def out(path: str) -> str:
        return f"output {path}"

    grad = "weight gradient "
    last_values = f"values {LAST}.self_attn"
    return [
        Odd("race in the head", out("lm_head"), LOG_PROB, race, "nondeterministic"),
        Odd("race in a product", out(f"{FIRST}.mlp.down_proj"), LOG_PROB, race, "nondeterministic"),
        Odd("dropout left on", out(f"{LAST}.mlp.act_fn"), LOG_PROB, dropout, "nondeterministic"),
        Odd("dropout of the residual", out(f"{FIRST}.mlp"), LOG_PROB, dropout, "nondeterministic"),
        Odd("attention dropout", f"mask {LAST}.self_attn", LOG_PROB, attention_dropout,
            "nondeterministic"),
        Odd("noise in a norm", out("model.norm"), LOG_PROB, gaussian(0.01), "nondeterministic"),
        Odd("noise in a gradient", f"backward {LAST}.mlp.down_proj", ACTOR_UPDATE, gaussian(0.03),
            "nondeterministic"),
        Odd("noise in a sum of gradients", "accumulate", ACTOR_UPDATE, gaussian(0.01),
            "nondeterministic"),
        Odd("values in e5m2", last_values, LOG_PROB, minifloat(3), "rounding_order"),
        Odd("values in int8", last_values, LOG_PROB, integers(127, -1), "rounding_order"),
        Odd("values in int4", f"values {FIRST}.self_attn", LOG_PROB, integers(7, -1),
            "rounding_order"),
        Odd("product in e4m3", out(f"{FIRST}.mlp.up_proj"), LOG_PROB, minifloat(4),
            "rounding_order"),
        Odd("bf16 by cutting", out(f"{LAST}.self_attn.o_proj"), LOG_PROB, cut_to_bf16,
            "rounding_order"),
        Odd("bf16 by chance", out(f"{LAST}.mlp.down_proj"), LOG_PROB, stochastic_bf16,
            "rounding_order"),
        Odd("bf16 and a factor", out(f"{LAST}.mlp.down_proj"), LOG_PROB, bf16_and_a_factor,
            "unknown"),
        Odd("bias added", out(f"{FIRST}.self_attn.q_proj"), LOG_PROB, bias, "unknown"),
        Odd("bias in the head", out("lm_head"), LOG_PROB, bias, "unknown"),
        Odd("soft cap of logits", out("lm_head"), LOG_PROB, soft_cap, "unknown"),
        Odd("soft cap of a norm", out(f"{LAST}.input_layernorm"), LOG_PROB, soft_cap, "unknown"),
        Odd("offsets of samples", out(FIRST), LOG_PROB, of_samples, "unknown"),
        Odd("offsets of samples in the answers", "answers", LOG_PROB, of_samples, "unknown"),
        Odd("weights of samples in the loss", "loss gradient", ACTOR_UPDATE, weights_of_samples,
            "unknown"),
        Odd("stale values", last_values, LOG_PROB, Stale(), "unknown"),
        Odd("every second call", out(f"{LAST}.self_attn.o_proj"), LOG_PROB, EverySecondCall(),
            "unknown"),
        Odd(
            "log-probs of one id are zero", "answers", LOG_PROB, OneIdIsZero(),
            "label_or_mask_shift",
        ),
        Odd("one logit scaled", out("lm_head"), LOG_PROB, one_channel, "unknown"),
        Odd("part of a head scaled", last_values, LOG_PROB, part_of_a_head, "unknown"),
        Odd("part of a head scaled early", out(f"{FIRST}.self_attn.v_proj"), LOG_PROB,
            part_of_a_head, "unknown"),
        Odd("last position lost", out(f"{LAST}.mlp.down_proj"), LOG_PROB, last_position_zero,
            "unknown"),
        Odd("first position doubled", out(f"{FIRST}.self_attn"), LOG_PROB, first_position_doubled,
            "unknown"),
        Odd("signs of some channels", out(f"{FIRST}.self_attn.k_proj"), LOG_PROB, some_signs,
            "unknown"),
        Odd("small values lost", out(f"{LAST}.mlp.act_fn"), LOG_PROB, small_lost, "unknown"),
        Odd("half a gradient lost", f"backward {LAST}.mlp.down_proj", ACTOR_UPDATE, half_zero,
            "unknown"),
        Odd("rows of a weight gradient lost", f"{grad}{LAST}.mlp.up_proj.weight", ACTOR_UPDATE,
            some_rows_zero, "unknown"),
        Odd("a factor for each parameter", "reduce", ACTOR_UPDATE, own_factor, "unknown"),
        Odd("some gradients lost", "reduce", ACTOR_UPDATE, some_parameters_lost, "unknown"),
        Odd("slopes of distance", f"mask {LAST}.self_attn", LOG_PROB, slopes, "unknown"),
        Odd("a row copied", out(f"{LAST}.mlp"), LOG_PROB, copy_of_a_row, "unknown"),
        Odd("answers offset", "answers", LOG_PROB, offset(-0.02), "unknown"),
        Odd("answers scaled at random", "answers", LOG_PROB, of_elements, "unknown"),
        Odd("elements scaled at random", out(f"{FIRST}.mlp.gate_proj"), LOG_PROB, of_elements,
            "unknown"),
        Odd("a norm that centres", out(f"{FIRST}.input_layernorm"), LOG_PROB, centred,
            "implementation"),
        Odd("tokens leak to the next", out(f"{FIRST}.mlp.down_proj"), LOG_PROB, leak, "unknown"),
        Odd("another power", out(f"{LAST}.mlp.act_fn"), LOG_PROB, square_root, "implementation"),
        Odd("noise in entropies", "entropies", LOG_PROB, gaussian(0.02), "nondeterministic"),
        Odd("noise in shown probabilities", f"probabilities {FIRST}.self_attn", LOG_PROB,
            gaussian(0.05), "nondeterministic"),
        Odd("heads swapped", last_values, LOG_PROB, swapped_heads, "layout"),
        Odd("channels interleaved", out(f"{FIRST}.self_attn.v_proj"), LOG_PROB, interleaved,
            "layout"),
        Odd("gradient transposed", f"{grad}{FIRST}.self_attn.q_proj.weight", ACTOR_UPDATE,
            transposed, "layout"),
        Odd("negative activations lost", out(f"{LAST}.mlp.act_fn"), LOG_PROB,
            clipped(0.0, np.inf), "saturation"),
        Odd("answers clipped", "answers", LOG_PROB, clipped(-4.0, 0.0), "saturation"),
        Odd("a gradient clipped", f"backward {LAST}.mlp.down_proj", ACTOR_UPDATE, clipped_share,
            "saturation"),
        Odd("the future leaks", f"mask {FIRST}.self_attn", LOG_PROB, future_leaks, "mask"),
        Odd("a short window", f"mask {LAST}.self_attn", LOG_PROB, window, "mask"),
        Odd("positions of rows shifted", "positions", LOG_PROB, shifted_rows, "position"),
        Odd("positions stretched", "positions", LOG_PROB, stretched, "position"),
        Odd("a weight in int8", "weights", LOG_PROB, int8_weights, "weights"),
        Odd("embeddings swapped", "weights", LOG_PROB, swapped_embeddings, "weights"),
    ]  # fmt: skip
