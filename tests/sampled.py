"""Every second case of a family in ``make test``, the others in ``make families``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_second(cases: Iterable[Any]) -> list[Any]:
    """The cases in their order, the second, fourth and so on marked ``long``.

    A tuple is the arguments of one case, anything else its only argument.
    """
    parts = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [
        pytest.param(*part, marks=pytest.mark.long if number % 2 else ())
        for number, part in enumerate(parts)
    ]
