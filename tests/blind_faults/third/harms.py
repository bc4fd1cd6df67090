"""Disturbances without a law, or with one that no class has: numbers in, other numbers out.

Each function takes a ``numpy.random.Generator`` and gives a :data:`Harm`. Arrays are
``[..., tokens, channels]``, of gradients of weights ``[rows, columns]``; what is given is not
changed. Where a disturbance is applied, and what may be said of it, stands in ``answers.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Harm = Callable[[Any], Any]
Make = Callable[[np.random.Generator], Harm]

HARMS: dict[str, Make] = {}


def harm(make: Make) -> Make:
    """Put a disturbance into :data:`HARMS` under its name."""
    HARMS[make.__name__] = make
    return make


def _of(y: Any, share: float) -> float:
    """A share of the numbers' size; never 0."""
    return share * max(float(np.sqrt(np.mean(np.square(y, dtype=np.float64)))), 1e-30)


# --- by chance, element by element ----------------------------------------------------------------


@harm
def noise_sized_by_its_channel(drawn):
    def change(y):
        sizes = np.exp(1.5 * drawn.standard_normal(y.shape[-1]))
        return y + _of(y, 0.01) * sizes * drawn.standard_normal(y.shape)

    return change


@harm
def noise_sized_by_the_square(drawn):
    def change(y):
        return y + 0.01 * y * np.abs(y) / _of(y, 1) * drawn.standard_normal(y.shape)

    return change


@harm
def signs_of_chance(drawn):
    return lambda y: np.where(drawn.random(y.shape) < 0.01, -y, y)


@harm
def one_step_up_or_down(drawn):
    return lambda y: y + _of(y, 0.01) * drawn.integers(-1, 2, y.shape)


@harm
def grid_met_by_chance(drawn):
    def change(y):
        step = _of(y, 0.02)
        return np.floor(y / step + drawn.random(y.shape)) * step

    return change


@harm
def noise_of_one_side(drawn):
    return lambda y: y + _of(y, 0.02) * drawn.exponential(size=y.shape)


@harm
def cauchy_tails_in_a_gradient(drawn):
    return lambda y: y + _of(y, 0.003) * np.clip(drawn.standard_cauchy(y.shape), -300, 300)


# --- by chance, with a shape ----------------------------------------------------------------------


@harm
def burst_in_a_block(drawn):
    """A rectangle of tokens and channels, another one at each call."""

    def change(y):
        y = y.copy()
        ends = [sorted(drawn.integers(0, size + 1, 2)) for size in y.shape[-2:]]
        rows, columns = (slice(first, max(last, first + 2)) for first, last in ends)
        block = y[..., rows, columns]
        y[..., rows, columns] = block + _of(y, 0.1) * drawn.standard_normal(block.shape)
        return y

    return change


@harm
def noise_of_rank_one(drawn):
    def change(y):
        tokens, channels = (drawn.standard_normal(size) for size in y.shape[-2:])
        return y + _of(y, 0.02) * np.outer(tokens, channels)

    return change


@harm
def noise_that_follows_itself(drawn):
    """Along channels, each nine tenths of the one before."""

    def change(y):
        fresh = drawn.standard_normal(y.shape)
        for channel in range(1, y.shape[-1]):
            fresh[..., channel] = 0.9 * fresh[..., channel - 1] + 0.44 * fresh[..., channel]
        return y + _of(y, 0.02) * fresh

    return change


@harm
def a_channel_of_chance_gets_the_mean(drawn):
    def change(y):
        hit = drawn.integers(0, y.shape[-1], y.shape[:-1])[..., None]
        y = y.copy()
        np.put_along_axis(y, hit, y.mean(-1, keepdims=True), -1)
        return y

    return change


@harm
def gain_of_this_call(drawn):
    return lambda y: y * (1 + 0.02 * drawn.standard_normal())


@harm
def noise_at_even_places(drawn):
    """Checked: channels and tokens whose sum is even."""

    def change(y):
        places = np.add.outer(np.arange(y.shape[-2]), np.arange(y.shape[-1]))
        return y + _of(y, 0.03) * (places % 2 == 0) * drawn.standard_normal(y.shape)

    return change


# --- races ----------------------------------------------------------------------------------------


@harm
def tiles_of_the_token_before(drawn):
    """A tile of eight channels is read before it is written: the token before left it."""

    def change(y):
        tiles = y.reshape(*y.shape[:-1], -1, 8)
        older = np.concatenate((tiles[..., :1, :, :], tiles[..., :-1, :, :]), -3)
        late = drawn.random(tiles.shape[:-1]) < 0.08
        return np.where(late[..., None], older, tiles).reshape(y.shape)

    return change


@harm
def sums_ended_early(drawn):
    """From a channel of chance on a token has but part of its sum."""

    def change(y):
        late = drawn.random(y.shape[:-1]) < 0.15
        first = drawn.integers(0, y.shape[-1], y.shape[:-1])
        part = drawn.uniform(0.5, 1, y.shape[:-1])
        hit = late[..., None] & (np.arange(y.shape[-1]) >= first[..., None])
        return np.where(hit, y * part[..., None], y)

    return change


@harm
def accumulators_not_cleared(drawn):
    """Now and then a token begins with what is left of the one before."""

    def change(y):
        left = (
            drawn.uniform(0.05, 0.3, (*y.shape[:-1], 1))
            * (drawn.random(y.shape[:-1]) < 0.1)[..., None]
        )
        older = np.concatenate((np.zeros_like(y[..., :1, :]), y[..., :-1, :]), -2)
        return y + left * older

    return change


@harm
def rows_lost_by_chance(drawn):
    """Rows of a gradient's sum get less than all that was added to them."""
    return lambda y: y * (1 - 0.2 * drawn.random((*y.shape[:-1], 1)) ** 4)


@harm
def blocks_added_in_any_order_and_rounded(drawn):
    """Eight parts of each number, cut in proportions of chance, are summed with nine bits."""

    def rounded(x):
        size = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - 8)
        return np.round(x / size) * size

    def change(y):
        shares = drawn.dirichlet(np.ones(8), y.shape)
        total = np.zeros(y.shape)
        for part in range(8):
            total = rounded(total + shares[..., part] * y)
        return total

    return change


# --- obscure formulas: the same at every call -----------------------------------------------------


@harm
def sine_of_itself_added(_):
    return lambda y: y + _of(y, 0.02) * np.sin(7 * y / _of(y, 1))


@harm
def dead_band_between_channels(_):
    """A channel keeps its left neighbour's number where it differs by little."""

    def change(y):
        left = np.concatenate((y[..., :1], y[..., :-1]), -1)
        return np.where(np.abs(y - left) < _of(y, 0.05), left, y)

    return change


@harm
def median_of_three(_):
    def change(y):
        three = np.stack((np.roll(y, 1, -1), y, np.roll(y, -1, -1)))
        y = y.copy()
        y[..., ::8] = np.median(three, 0)[..., ::8]
        return y

    return change


@harm
def companded_to_mu_law(_):
    """255 steps of the logarithm, as telephones have them."""

    def change(y):
        most = max(float(np.abs(y).max()), 1e-30)
        code = np.round(127 * np.log1p(255 * np.abs(y) / most) / np.log(256)) / 127
        return np.sign(y) * most * np.expm1(code * np.log(256)) / 255

    return change


@harm
def drawn_to_the_mean_of_its_token(_):
    """The larger a token is, the further its channels come together."""

    def change(y):
        size = np.sqrt(np.mean(y * y, -1, keepdims=True))
        pull = 0.05 * size / (size + _of(y, 1))
        return y + pull * (y.mean(-1, keepdims=True) - y)

    return change


@harm
def turned_by_its_own_length(_):
    """Pairs of channels are turned by an angle that grows with their length."""

    def change(y):
        one, other = y[..., 0::2], y[..., 1::2]
        angle = 0.05 * np.hypot(one, other) / _of(y, 1)
        turned = (
            one * np.cos(angle) - other * np.sin(angle),
            one * np.sin(angle) + other * np.cos(angle),
        )
        return np.stack(turned, -1).reshape(y.shape)

    return change


@harm
def curved_like_a_parabola(_):
    return lambda y: y + 0.01 * (y * y - np.mean(y * y)) / _of(y, 1)


@harm
def gain_of_the_square_of_the_place(_):
    def change(y):
        places = np.arange(y.shape[-2])[:, None]
        return y * (1 + 0.02 * np.sin(places * places))

    return change


@harm
def dithered_by_its_own_digits(_):
    """What is added looks like chance and is a function of the number."""

    def change(y):
        digits = np.modf(1e4 * np.sin(12.9898 * y / _of(y, 1)))[0]
        return y + _of(y, 0.02) * digits

    return change


@harm
def log_probs_bent_in_the_middle(_):
    """Those near the batch's median are moved, both ends are not."""

    def change(y):
        middle = np.median(y)
        return y + 0.05 * np.exp(-np.square(2 * (y - middle)))

    return change


# --- mixtures -------------------------------------------------------------------------------------


@harm
def rounded_here_stretched_there(_):
    """The first sample of a call has seven bits, the others are two hundredths larger."""

    def change(y):
        y = np.array(y, np.float64)
        size = np.exp2(np.floor(np.log2(np.maximum(np.abs(y[0]), 1e-30))) - 6)
        y[0] = np.round(y[0] / size) * size
        y[1:] *= 1.02
        return y

    return change


@harm
def noise_upon_an_offset(drawn):
    """Noise, and an offset of half its size: neither alone explains it."""
    return lambda y: y + _of(y, 0.02) * (0.5 + drawn.standard_normal(y.shape))
