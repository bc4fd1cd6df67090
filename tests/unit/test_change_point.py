"""Where along a sequence a difference begins: the first place that differs, whatever the noise."""

from __future__ import annotations

import numpy as np
import pytest

from rlprobe.judge.keydata import change_point


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("place", [8, 16, 17, 40])
def test_it_is_the_first_place_that_differs(seed: int, place: int) -> None:
    """Also where noise grows along the sequence, so that the last place before has much of it."""
    draw = np.random.default_rng(seed)
    noise = [1e-6 * np.abs(draw.normal(size=47)) * np.linspace(1, 3, 47) for _ in range(2)]
    faulty = [line + (np.arange(47) >= place) * draw.uniform(0.3, 1, 47) for line in noise]
    assert change_point(faulty) == place
    assert change_point(noise) is None


def test_stale_rows_begin_where_the_first_of_them_is() -> None:
    line = np.full(47, 1e-7)
    line[[16, 32]] = 0.5
    assert change_point([line, line]) == 16
