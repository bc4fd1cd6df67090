"""``python -m benchmarks.rules`` counts what it says."""

from __future__ import annotations

from benchmarks import rules


def test_a_class_that_is_named_is_a_rule_and_a_number_a_constant() -> None:
    source = '''
"""mask"""
_LIMIT = 0.3
FIRST = rows[5]
def of(x):
    "layout"
    if x > _LIMIT and x < 1e-3 or x == 0:
        return "mask"
    return "unknown"
'''
    assert rules.counted(source) == (1, 2)
