"""Ten more disturbances of the numpy transformer without a law, or with one that no class has."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rlprobe import stages
from tests.blind_faults import lawless
from tests.blind_faults.lawless import Case

ANSWERS = Path(__file__).with_name("answers.yaml")
CASES: dict[str, Case] = {}

case = lawless.registering(CASES)


def answers() -> dict[str, lawless.Answer]:
    """The answers, by name of the case."""
    return lawless.answers(ANSWERS)


# --- by chance ----------------------------------------------------------------------------------


@case(stages.REFERENCE, "output model.layers.0.mlp.gate_proj")
def gains_of_channels_by_chance(drawn):
    return lambda y: y * np.exp(0.02 * drawn.standard_normal(y.shape[-1]))


@case(stages.LOG_PROB, "output model.layers.1.self_attn.v_proj")
def offset_that_wanders(drawn):
    def harm(y):
        steps = 0.02 * y.std() * drawn.standard_normal(y.shape[:-1])
        return y + np.cumsum(steps, -1)[..., None]

    return harm


@case(stages.REFERENCE, "output model.layers.1.mlp.up_proj")
def pairs_exchanged_by_chance(drawn):
    def harm(y):
        paired = y.reshape(*y.shape[:-1], -1, 2)
        hit = drawn.random(paired.shape[:-1]) < 0.03
        return np.where(hit[..., None], paired[..., ::-1], paired).reshape(y.shape)

    return harm


# --- numbers that no format has -------------------------------------------------------------------


def _in_octaves(y, parts):
    """The nearest power of two to the ``parts``-th part."""
    size = np.maximum(np.abs(y), 1e-30)
    return np.sign(y) * 2.0 ** (np.round(np.log2(size) * parts) / parts)


@case(stages.LOG_PROB, "output model.layers.0.self_attn.o_proj")
def eighths_of_an_octave(_):
    return lambda y: _in_octaves(y, 8)


@case(stages.REFERENCE, "output model.layers.1.self_attn.o_proj")
def one_sample_in_int8(_):
    def harm(y):
        y = y.copy()
        step = np.abs(y[1]).max() / 127
        y[1] = np.round(y[1] / step) * step
        return y

    return harm


# --- laws of which the list of causes has none --------------------------------------------------


@case(stages.REFERENCE, "output model.layers.0.mlp.down_proj")
def a_power_near_one(_):
    return lambda y: np.sign(y) * np.abs(y) ** 1.01


@case(stages.LOG_PROB, "output model.layers.0.self_attn.q_proj")
def each_token_smears_into_the_next(_):
    def harm(y):
        smeared = y.copy()
        smeared[..., 1:, :] += 0.03 * y[..., :-1, :]
        return smeared

    return harm


@case(stages.ACTOR_UPDATE, "weight gradient model.layers.1.mlp.gate_proj.weight")
def small_elements_change_sign(_):
    return lambda g: np.where(np.abs(g) < 0.2 * g.std(), -g, g)


@case(stages.ACTOR_UPDATE, "backward model.layers.0.mlp.up_proj")
def rows_of_a_gradient_bounded(_):
    def harm(g):
        norms = np.linalg.norm(g, axis=-1, keepdims=True)
        bound = 0.7 * np.median(norms)
        return g * np.minimum(1, bound / np.maximum(norms, 1e-30))

    return harm


@case(stages.LOG_PROB, "answers")
def log_probs_averaged_with_the_next(_):
    def harm(y):
        mixed = y.copy()
        mixed[..., :-1] = 0.9 * y[..., :-1] + 0.1 * y[..., 1:]
        return mixed

    return harm
