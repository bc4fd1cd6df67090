"""Thirty disturbances of the numpy transformer, most of which follow no law at all.

Each is a :class:`Case`: what a device does wrong (words of ``Device.faults``) and the stage it is
confined to. What may be said of it stands in ``answers.yaml`` beside it, under ``lawless``, and is
read by :func:`answers`. Disturbances that are random draw other numbers at every call and are the
same again for a device that is made anew with the same seed.

    device = CASES["soft_cap"].device(seed=0)
    transformer.run(scratch, device)
    ...                                # judged against transformer.run(other, Device(seed=0))
    assert cause in answers()["soft_cap"].may_say
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlprobe import stages
from tests.unit.diagnose.transformer import MICRO, Device

Harm = Callable[[Any], Any]
#: From a generator to words of ``Device.faults``.
Make = Callable[[np.random.Generator], dict[str, Harm]]

ANSWERS = Path(__file__).with_name("answers.yaml")


@dataclass(frozen=True)
class Case:
    """A disturbance: where it is confined to and what it does."""

    stage: str
    make: Make

    def device(self, seed: int = 0) -> Device:
        """A device with other kernels than the benchmark's, and this disturbance."""
        drawn = np.random.default_rng([seed, 77])
        return Device(split=True, seed=seed, faults=dict(self.make(drawn)), stage=self.stage)


@dataclass(frozen=True)
class Answer:
    """What is true of a case."""

    stage: str
    #: Each of them is right.
    modules: tuple[str | None, ...]
    #: Cause classes that are no false assertion; ``unknown`` is always one.
    may_say: frozenset[str]
    #: What would be false to say, in words.
    would_be_false: str


def answers(file: Path = ANSWERS) -> dict[str, Answer]:
    """The answers of a file, by name of the case."""
    read = yaml.safe_load(file.read_text(encoding="utf-8"))["lawless"]
    return {
        name: Answer(
            found["stage"],
            tuple(found["modules"]),
            frozenset(found["may_say"]),
            found["would_be_false"],
        )
        for name, found in read.items()
    }


Register = Callable[[Callable[[np.random.Generator], Harm]], Make]


def registering(cases: dict[str, Case]) -> Callable[..., Register]:
    """A decorator that puts what it is given into ``cases``."""

    def case(stage: str, *words: str) -> Register:
        """Register what ``harm(generator)`` gives under its name, as all of ``words``."""

        def register(harm: Callable[[np.random.Generator], Harm]) -> Make:
            def make(drawn: np.random.Generator) -> dict[str, Harm]:
                return {word: harm(drawn) for word in words}

            cases[harm.__name__] = Case(stage, make)
            return make

        return register

    return case


CASES: dict[str, Case] = {}

case = registering(CASES)


def _to_e4m3(y: Any) -> Any:
    """The nearest number with three bits of fraction, exponents from -6 on, 448 at most."""
    exponent = np.floor(np.log2(np.maximum(np.abs(y), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.clip(np.round(y / step) * step, -448, 448)


def _to_bf16(y: Any) -> Any:
    bits = np.asarray(y, np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & 0xFFFF0000).astype(np.uint32).view(np.float32)


# --- noise ------------------------------------------------------------------------------------


@case(stages.REFERENCE, "output model.layers.0.mlp.down_proj")
def gaussian_noise(drawn):
    return lambda y: y + 0.01 * y.std() * drawn.standard_normal(y.shape)


@case(stages.LOG_PROB, "output model.layers.1.self_attn.q_proj")
def noise_with_heavy_tails(drawn):
    return lambda y: y + 0.003 * y.std() * drawn.standard_cauchy(y.shape)


@case(stages.REFERENCE, "output model.layers.0.mlp.up_proj")
def factors_of_chance(drawn):
    return lambda y: y * (1 + 0.01 * drawn.laplace(size=y.shape))


@case(stages.LOG_PROB, "output model.layers.1.mlp.gate_proj")
def few_values_hit_hard(drawn):
    def harm(y):
        hit = drawn.random(y.shape) < 0.01
        return y + hit * drawn.choice([-0.5, 0.5], y.shape)

    return harm


@case(stages.REFERENCE, "output model.layers.0.self_attn.v_proj")
def one_number_for_each_token(drawn):
    return lambda y: y + 0.05 * drawn.standard_normal(y.shape[:-1])[..., None]


@case(stages.LOG_PROB, "output model.layers.1.self_attn.o_proj")
def noise_that_grows_along_a_row(drawn):
    def harm(y):
        along = np.arange(y.shape[-2])[:, None] / y.shape[-2]
        return y + 0.02 * along * drawn.standard_normal(y.shape)

    return harm


@case(stages.REFERENCE, "output model.layers.0.mlp.gate_proj")
def noise_as_large_as_the_neighbour(drawn):
    def harm(y):
        return y + 0.02 * np.abs(np.roll(y, 1, -1)) * drawn.uniform(-1, 1, y.shape)

    return harm


@case(stages.LOG_PROB, "output model.layers.1.mlp.down_proj")
def dropout_left_on(drawn):
    return lambda y: y * (drawn.random(y.shape) >= 0.02) / 0.98


@case(stages.REFERENCE, "output model.layers.1.mlp.up_proj")
def one_token_of_other_numbers(drawn):
    def harm(y):
        y = y.copy()
        y[:, 9] = y.std() * drawn.standard_normal(y[:, 9].shape)
        return y

    return harm


@case(stages.ACTOR_UPDATE, "backward model.layers.1.mlp.down_proj")
def noise_in_a_gradient(drawn):
    return lambda g: g * (1 + 0.02 * drawn.standard_normal(g.shape))


@case(stages.ACTOR_UPDATE, "weight gradient model.layers.0.mlp.up_proj.weight")
def additions_lost_in_a_race(drawn):
    return lambda g: g * (drawn.random(g.shape) >= 0.02)


# --- shorter formats --------------------------------------------------------------------------


@case(stages.REFERENCE, "output model.layers.1.mlp.up_proj")
def values_in_fp8(_):
    return _to_e4m3


@case(stages.LOG_PROB, "output model.layers.0.mlp.down_proj")
def fp8_rounded_by_chance(drawn):
    def harm(y):
        exponent = np.floor(np.log2(np.maximum(np.abs(y), 2.0**-6)))
        step = 2.0 ** (exponent - 3)
        return np.floor(y / step + drawn.random(y.shape)) * step

    return harm


@case(stages.REFERENCE, "output model.layers.0.self_attn.k_proj")
def channels_in_int8(_):
    def harm(y):
        step = np.abs(y).max(axis=(0, 1), keepdims=True) / 127
        return np.round(y / step) * step

    return harm


@case(stages.LOG_PROB, "output model.layers.1.self_attn.v_proj")
def int4_in_blocks_of_eight(_):
    def harm(y):
        blocks = y.reshape(*y.shape[:-1], -1, 8)
        step = np.abs(blocks).max(-1, keepdims=True) / 7
        return (np.round(blocks / step) * step).reshape(y.shape)

    return harm


@case(stages.REFERENCE, "output model.layers.1.mlp.gate_proj")
def small_values_lost(_):
    return lambda y: np.where(np.abs(y) < 0.1, 0, y)


# --- laws of which the list of causes has none --------------------------------------------------


@case(stages.LOG_PROB, "output model.layers.1.mlp.act_fn")
def the_same_bias_everywhere(_):
    return lambda y: y + 0.03


@case(stages.REFERENCE, "output lm_head")
def soft_cap(_):
    return lambda y: 4 * np.tanh(y / 4)


@case(stages.REFERENCE, "output model.layers.0.self_attn.o_proj")
def an_offset_for_each_sample(drawn):
    offsets = 0.05 * drawn.standard_normal(MICRO)[:, None, None]
    return lambda y: y + offsets


@case(stages.LOG_PROB, "output model.layers.0.post_attention_layernorm")
def a_factor_for_each_sample(drawn):
    factors = drawn.uniform(0.97, 1.03, MICRO)[:, None, None]
    return lambda y: y * factors


@case(stages.REFERENCE, "output model.layers.0.self_attn.q_proj")
def neighbours_multiply(_):
    return lambda y: y + 0.02 * np.roll(y, 1, -1) * np.roll(y, -1, -1)


@case(stages.LOG_PROB, "answers")
def a_ripple_over_log_probs(_):
    return lambda y: y + 0.01 * np.sin(50 * y)


@case(stages.ACTOR_UPDATE, "weight gradient model.layers.1.self_attn.o_proj.weight")
def a_bit_of_the_fraction_flipped(drawn):
    def harm(g):
        bits = np.ascontiguousarray(g, np.float32).view(np.uint32)
        hit = drawn.random(g.shape) < 0.1
        return (bits ^ (hit.astype(np.uint32) << 20)).view(np.float32)

    return harm


# --- other values ------------------------------------------------------------------------------


@case(stages.LOG_PROB, "output model.layers.0.mlp.down_proj")
def values_of_the_call_before(_):
    held: list[Any] = []

    def harm(y):
        held.append(y.copy())
        return held[-2] if len(held) > 1 else y

    return harm


@case(stages.REFERENCE, "output model.layers.1.self_attn.k_proj")
def one_sample_mixed_with_the_other(_):
    def harm(y):
        y = y.copy()
        y[1] = (y[0] + y[1]) / 2
        return y

    return harm


@case(stages.REFERENCE, "output model.layers.0.self_attn.q_proj")
def channels_in_an_order_of_chance(_):
    return lambda y: y[..., np.random.default_rng(5).permutation(y.shape[-1])]


@case(stages.LOG_PROB, "output model.layers.1.mlp.up_proj")
def another_order_at_each_token(_):
    def harm(y):
        orders = np.random.default_rng(6).permuted(
            np.tile(np.arange(y.shape[-1]), (y.shape[1], 1)), axis=1
        )
        return np.take_along_axis(y, np.broadcast_to(orders, y.shape), -1)

    return harm


@case(stages.REFERENCE, "output model.layers.0.mlp.up_proj")
def values_cut_off(_):
    return lambda y: np.minimum(y, 1.5)


# --- two at once --------------------------------------------------------------------------------


@case(stages.LOG_PROB, "output model.layers.0.self_attn.q_proj")
def scaled_and_rounded(_):
    return lambda y: _to_bf16(y * 1.004)


def _scaled_here_noisy_there(drawn: np.random.Generator) -> dict[str, Harm]:
    return {
        "output model.layers.0.mlp.gate_proj": lambda y: y * 1.003,
        "output model.layers.1.self_attn.k_proj": lambda y: (
            y + 0.02 * drawn.standard_normal(y.shape)
        ),
    }


CASES["scaled_here_noisy_there"] = Case(stages.REFERENCE, _scaled_here_noisy_there)
