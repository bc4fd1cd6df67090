"""Is a fault weakened to twice the floor, however its error grows with the strength?"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from rlprobe.selftest.weaken import HIGH, LOW, MOST, search


def _counting(ratio: Callable[[float], float]) -> tuple[Callable[[float], float], list[float]]:
    asked: list[float] = []

    def at(strength: float) -> float:
        asked.append(strength)
        return ratio(strength)

    return at, asked


@pytest.mark.parametrize("full", [3.0, 1e2, 1e4, 1e7])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_any_power_law_is_followed_to_twice_the_floor(full: float, power: float) -> None:
    at, asked = _counting(lambda s: full * s**power)
    ended = search(full, at)
    assert ended.reached
    assert ended.ratio is not None
    assert LOW <= ended.ratio <= HIGH
    assert len(asked) <= 3


def test_round_off_under_the_error_does_not_mislead_the_search() -> None:
    ended = search(1e5, lambda s: math.hypot(1e5 * s, 0.4))
    assert ended.reached


def test_an_error_that_saturates_is_followed_too() -> None:
    ended = search(1e3, lambda s: 1e3 * math.tanh(50 * s))
    assert ended.reached


def test_an_error_that_saturates_over_decades_is_followed_too() -> None:
    """A limit that is lifted: all the same from far below its full strength on."""
    at, asked = _counting(lambda s: min(7e11 * s, 7e5 * (1 + 0.05 * s)) + 0.15)
    ended = search(at(1.0), at)
    assert ended.reached
    assert len(asked) <= MOST + 1


def test_a_fault_that_ignores_its_strength_is_said_to() -> None:
    at, asked = _counting(lambda s: 500.0)
    ended = search(500.0, at)
    assert (ended.reached, ended.reason) == (False, "it ignores its strength")
    assert len(asked) == 1


def test_a_fault_that_jumps_over_the_aim_ends_with_the_gap() -> None:
    at, asked = _counting(lambda s: 40.0 if s > 0.01 else 0.2)
    ended = search(50.0, at)
    assert "no strength between" in ended.reason
    assert len(asked) == MOST


@pytest.mark.parametrize("full", [None, math.inf, math.nan])
def test_an_error_without_a_multiple_is_not_scaled(full: float | None) -> None:
    assert "not a finite multiple" in search(full, lambda s: 1.0).reason


def test_a_fault_near_the_floor_is_left_as_it_is() -> None:
    def never(_: float) -> float:
        raise AssertionError

    assert search(2.2, never).strength == 1.0
    assert "below twice the floor" in search(1.2, never).reason
