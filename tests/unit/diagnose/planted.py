"""Faults of a device, and what a diagnosis must say of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlprobe.stages import ACTOR_UPDATE, LOG_PROB, REFERENCE

Array = np.ndarray
LAYER = "model.layers.1"
LARGEST = np.finfo(np.float32).max
#: Statistics obey no law: what operators ran tells.
UNKNOWN = ("unknown",)
MATRIX = f"{LAYER}.mlp.up_proj.weight"


@dataclass(frozen=True)
class Planted:
    """One fault."""

    name: str
    faults: dict[str, Any]
    causes: tuple[str, ...]
    module: str | None = None
    stage: str = LOG_PROB
    verdict: str = "diverged"
    #: Stage that the fault is confined to; None: wherever the model runs.
    only: str | None = LOG_PROB


def bfloat16(x: Array) -> Array:
    """Round fp32 to the nearest bf16."""
    bits: np.ndarray = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def poisoned(x: Array) -> Array:
    y = x.copy()
    y.flat[7] = np.nan
    return y


def leaking(mask: Array) -> Array:
    """A mask that lets every token see all of the others a little."""
    return np.maximum(mask, -12.0)


def windowed(mask: Array) -> Array:
    """A mask that also hides what is 5 tokens back or more."""
    far = np.tril(np.ones(mask.shape[-2:]), -5) > 0
    return np.where(far, np.float32(-3.4e38), mask)


def channels(width: int, size: float) -> Array:
    """Factors next to 1: near enough to one factor for norms, extremes and a sketch's error."""
    return (1.0 - size * np.where(np.arange(width) % 2, 0.82, 1.18)).astype(np.float32)


def of_samples(gradient: Array) -> Array:
    """The mean over a sample's tokens instead of each token's own."""
    return np.broadcast_to(gradient.mean(-1, keepdims=True), gradient.shape).astype(np.float32)


def swapped_heads(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], -1)


def other_weights(change: Any) -> dict[str, Any]:
    return {"weights": lambda w: {**w, MATRIX: change(w[MATRIX])}}


FORWARD = [
    Planted("epsilon of a norm", {f"eps {LAYER}.input_layernorm": 1e-2},
            UNKNOWN, f"{LAYER}.input_layernorm"),
    Planted("a small epsilon", {f"eps {LAYER}.input_layernorm": 1e-4},
            UNKNOWN, f"{LAYER}.input_layernorm"),
    Planted("scaled projection", {f"output {LAYER}.mlp.up_proj": lambda y: y * 1.01},
            ("constant_factor",), f"{LAYER}.mlp.up_proj"),
    Planted("scaled by two parts in 100,000", {"output lm_head": lambda y: y * np.float32(1.00002)},
            ("constant_factor",), "lm_head"),
    Planted("saturated in fp16", {f"output {LAYER}.mlp.act_fn":
                                     lambda y: np.where(y > 0.5, 65504, y)},
            ("saturation",), f"{LAYER}.mlp.act_fn"),
    Planted("channels smaller by some parts in 100,000",
            {f"output {LAYER}.mlp.up_proj": lambda y: y * channels(y.shape[-1], 1e-4)},
            ("unknown",), f"{LAYER}.mlp.up_proj"),
    Planted("a bias too many", {"output lm_head": lambda y: y + np.float32(0.05)},
            ("unknown",), "lm_head"),
    Planted("a product in bf16", {f"output {LAYER}.self_attn.v_proj": bfloat16},
            ("rounding_order",), f"{LAYER}.self_attn.v_proj"),
    Planted("values of other heads", {f"values {LAYER}.self_attn": swapped_heads},
            UNKNOWN, f"{LAYER}.self_attn"),
    Planted("a window of 5 tokens", {f"mask {LAYER}.self_attn": windowed},
            UNKNOWN, f"{LAYER}.self_attn"),
    Planted("no causal mask", {f"mask {LAYER}.self_attn": lambda m: m * 0},
            ("mask",), f"{LAYER}.self_attn"),
    Planted("softmax scale", {f"scale {LAYER}.self_attn": 1.05},
            UNKNOWN, f"{LAYER}.self_attn"),
    Planted("mask of the last tokens", {f"mask {LAYER}.self_attn": leaking},
            ("mask",), f"{LAYER}.self_attn"),
    Planted("keys turned by other angles", {f"key angles {LAYER}.self_attn": lambda a: a[:, ::-1]},
            UNKNOWN, f"{LAYER}.self_attn"),
    Planted("another activation", {f"output {LAYER}.mlp.act_fn": lambda y: y + 0.05 * y**2},
            UNKNOWN, f"{LAYER}.mlp.act_fn"),
    Planted("an activation that is clipped", {f"output {LAYER}.mlp.act_fn":
                                                  lambda y: np.minimum(y, np.float32(0.2))},
            ("saturation",), f"{LAYER}.mlp.act_fn"),
    Planted("a norm larger by three parts in 100,000",
            {f"output {LAYER}.input_layernorm": lambda y: y * np.float32(1.00003)},
            ("constant_factor",), f"{LAYER}.input_layernorm"),
    Planted("positions from 1", {"positions": lambda p: p + 1},
            ("position",), "model"),
    Planted("rotary angles", {"output model.rotary_emb": lambda y: y[::-1]},
            ("position",), "model.rotary_emb"),
    Planted("swapped heads", {f"output {LAYER}.self_attn.q_proj": swapped_heads},
            ("layout",), f"{LAYER}.self_attn.q_proj"),
    Planted("bf16 in a norm", {f"output {LAYER}.input_layernorm": bfloat16},
            ("rounding_order",), f"{LAYER}.input_layernorm"),
    Planted("bf16 product", {f"output {LAYER}.mlp.down_proj": bfloat16},
            ("accumulation", "rounding_order"), f"{LAYER}.mlp.down_proj"),
    Planted("first layer", {"output model.layers.0.self_attn.v_proj": lambda y: y + 0.01},
            ("unknown",), "model.layers.0.self_attn.v_proj"),
    Planted("not a number", {f"output {LAYER}.mlp.act_fn": poisoned},
            ("nonfinite",), f"{LAYER}.mlp.act_fn"),
    Planted("saturated", {f"output {LAYER}.mlp.act_fn": lambda y: np.where(y > 0.5, LARGEST, y)},
            ("saturation",), f"{LAYER}.mlp.act_fn"),
    Planted("in the reference only", {"output lm_head": lambda y: y * 1.01},
            ("constant_factor",), "lm_head", stage=REFERENCE, only=REFERENCE),
]  # fmt: skip

UPDATE = [
    Planted("forward of the update", {f"output {LAYER}.mlp": lambda y: y + 0.1},
            ("unknown",), f"{LAYER}.mlp", ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("loss twice as large", {"loss scale": 2.0},
            ("constant_factor", "loss"), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("loss of other tokens", {"loss gradient": lambda g: np.roll(g, 1, -1)},
            UNKNOWN, None, ACTOR_UPDATE,
            only=ACTOR_UPDATE),
    Planted("loss of each sample's mean", {"loss gradient": of_samples},
            UNKNOWN, None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("loss of each sample's mean, a little",
            {"loss gradient": lambda g: g + np.float32(1e-4) * (of_samples(g) - g)},
            UNKNOWN, None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("backward of a product",
            {f"backward {LAYER}.mlp.down_proj": lambda g: g * np.float32(1.1)},
            ("constant_factor",), f"{LAYER}.mlp.down_proj", ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("backward of attention",
            {f"backward {LAYER}.self_attn": lambda g: np.roll(g, 1, -1)},
            ("layout", "unknown"), f"{LAYER}.self_attn", ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("gradient of one weight",
            {f"weight gradient {MATRIX}": lambda g: g * np.float32(0.5)},
            ("constant_factor",), f"{LAYER}.mlp.up_proj", ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("bf16 accumulation", {"accumulate": bfloat16},
            UNKNOWN, None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("reduction", {"reduce": lambda g: g * 2},
            ("reduction", "constant_factor"), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("clipping", {"clip": 0.5}, ("optimizer",), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("learning rate", {"learning rate": 1.1e-3},
            ("optimizer",), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("learning rate off by a thousandth", {"learning rate": 1.001e-3},
            ("optimizer",), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("weight decay", {"weight decay": 0.1},
            ("optimizer",), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("temperature", {"temperature": 1.1},
            ("sampling_semantics",), None, LOG_PROB, only=LOG_PROB),
    Planted("labels shifted", {"label shift": 1},
            UNKNOWN, None, LOG_PROB, only=LOG_PROB),
    Planted("log-probs of other rows", {"answers": lambda y: np.roll(y, 1, 0)},
            ("row_order",), None, LOG_PROB, only=LOG_PROB),
    Planted("temperature of the update", {"temperature": 1.1},
            UNKNOWN, None, ACTOR_UPDATE, only=ACTOR_UPDATE),
    Planted("advantages", {"advantages": lambda a: a + np.array([0, 0, 1, 0])},
            ("data",), None, ACTOR_UPDATE, only=ACTOR_UPDATE),
]  # fmt: skip

SHUT = [
    Planted("other weights", other_weights(lambda w: w * np.float32(1.001)),
            ("weights",), f"{LAYER}.mlp.up_proj", LOG_PROB, "not_comparable", None),
    Planted("permuted weights", other_weights(lambda w: np.roll(w, 4, 0)),
            ("weights", "layout"), f"{LAYER}.mlp.up_proj", LOG_PROB, "not_comparable", None),
    Planted("weights that stay behind", {"stale": True},
            ("stale_weights",), None, LOG_PROB, "not_comparable", None),
    Planted("all weights off", {"weights": lambda w: {k: v * 1.0001 for k, v in w.items()}},
            ("weights",), None, LOG_PROB, "not_comparable", None),
    Planted("one stage's rows reversed", {"rows of the update": True},
            ("row_order",), None, ACTOR_UPDATE, "not_comparable", None),
    Planted("other tokens", {"tokens": lambda t: np.where(np.arange(t.size).reshape(t.shape) == 9,
                                                          0, t)},
            ("data",), None, REFERENCE, "not_comparable", None),
    Planted("other rewards", {"rewards": lambda r: r + np.array([0, 0, 1, 0])},
            ("data",), None, ACTOR_UPDATE, "not_comparable", None),
]  # fmt: skip

#: The one that most tests plant.
EPSILON = next(fault for fault in FORWARD if fault.name == "epsilon of a norm")
