"""Modules with values of their own, so that only the right pairs are equal."""

from __future__ import annotations

from typing import Any

from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import Result


def leaf(top: float, shape: tuple[int, ...] = (4, 8)) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), shape)


def modules(*names: str, prefix: str = "", start: float = 1.0) -> dict[str, Any]:
    """A forward call of each ``path.Class``, every one with values of its own."""
    return {
        f"Module.{prefix}{name}.forward.0": call([leaf(start + n)], [leaf(start + n + 0.5)])
        for n, name in enumerate(names)
    }


def assert_all_equal(result: Result, **used: int) -> None:
    """Every record has its counterpart, of the same values, by these rules."""
    counts = result.summary["counts"]
    assert counts["benchmark_only"] == counts["target_only"] == 0, result.summary["unmatched"]
    assert result.records["error"].max() == 0
    assert result.summary["rules"] == used
