"""Which recorded step does a replay take?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprobe.errors import ReplayError
from rlprobe.rollouts.order import ReplayOrder


def test_without_a_seed_each_step_replays_itself():
    order = ReplayOrder([0, 1, 5])
    assert [order.recorded(step) for step in (0, 1, 5)] == [0, 1, 5]


def test_without_a_seed_a_step_that_was_not_recorded_is_named_with_those_that_were():
    with pytest.raises(ReplayError, match=r"step 4 was not recorded; recorded: 0-2, 7"):
        ReplayOrder([0, 1, 2, 7]).recorded(4)


def test_minus_one_cycles_in_order_from_the_start_of_the_range():
    order = ReplayOrder(range(10), seed=-1, start=2, end=4)
    assert [order.recorded(step) for step in range(7)] == [2, 3, 4, 2, 3, 4, 2]


def test_a_seed_gives_this_very_sequence_on_every_machine():
    order = ReplayOrder(range(8), seed=7)
    assert [order.recorded(step) for step in range(12)] == SEED_7


#: Computed once by the documented formula with another program (sha256sum and shell arithmetic).
SEED_7 = [1, 2, 1, 1, 3, 4, 2, 5, 4, 0, 7, 6]


@settings(deadline=None)
@given(st.integers().filter(lambda s: s != -1), st.integers(0, 50), st.integers(0, 50))
def test_a_random_sequence_stays_in_its_range_and_needs_no_history(seed, start, width):
    order = ReplayOrder(range(200), seed=seed, start=start, end=start + width)
    forward = [order.recorded(step) for step in range(20)]
    assert forward == [order.recorded(step) for step in reversed(range(20))][::-1]
    assert all(start <= step <= start + width for step in forward)


def test_a_random_sequence_reaches_every_step():
    order = ReplayOrder(range(5), seed=0)
    assert {order.recorded(step) for step in range(200)} == set(range(5))


@pytest.mark.parametrize(
    ("available", "kwargs", "message"),
    [
        ([], {}, "no recorded step"),
        ([0, 1], {"seed": -1, "start": 1, "end": 0}, "run from 1 to 0, which is empty"),
        ([0, 1], {"seed": 3, "start": -1, "end": 0}, "count from 0; the range starts at -1"),
        ([0, 1, 3], {"seed": 3, "end": 3}, r"step 2 of the range 0\.\.3 .* recorded: 0-1, 3"),
        ([5], {"seed": -1, "end": 2}, r"step 0 of the range"),
        ([0], {"seed": -1, "end": 10**15}, "step 1 of the range"),
    ],
)
def test_a_range_that_cannot_be_replayed_is_refused_at_once(available, kwargs, message):
    with pytest.raises(ReplayError, match=message):
        ReplayOrder(available, **kwargs)
