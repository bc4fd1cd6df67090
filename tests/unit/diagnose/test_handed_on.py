"""Results that differ where they are handed to nobody: every ground is asked for, by sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlprobe.judge import handed_on, keydata
from rlprobe.judge.keydata import Array, Difference, Row

#: Tokens of two samples' prompts and responses; a result's entry i is about token i + 1.
PROMPT, RESPONSE = 6, 4
SAMPLES = ("a", "b")
Change = Callable[[Array], None]


def values(change: Change | None = None) -> dict[str, Array]:
    found = {
        s: np.random.default_rng(n).normal(size=PROMPT + RESPONSE) for n, s in enumerate(SAMPLES)
    }
    for array in found.values():
        if change is not None:
            change(array)
    return found


def difference(name: str, *sides: dict[str, Array]) -> Difference:
    rows = [[Row(s, v, 0, n) for n, (s, v) in enumerate(side.items())] for side in sides]
    return keydata.compare(rows[0], rows[1], name, 0)


def handed(side: dict[str, Array]) -> dict[str, Array]:
    return {s: v[PROMPT - 1 : -1] for s, v in side.items()}


def found(change: Change, given: bool = True) -> dict[str, Difference]:
    sides = values(), values(change)
    known = {"values": difference("values", *sides)}
    known["handed_values"] = difference("handed_values", *sides)
    if given:
        known["given_values"] = difference("given_values", *map(handed, sides))
    return known


def prompts(array: Array) -> None:
    array[: PROMPT - 1] += 1.0
    array[-1] += 1.0


def test_only_what_is_handed_on_is_held_against_its_floor() -> None:
    narrow = handed_on.narrowed(found(prompts), "values")
    assert narrow is not None
    within, dropped = narrow
    assert {name: d.error for name, d in within.items()} == {"values": 0.0, "handed_values": 0.0}
    assert within["values"].count == len(SAMPLES) * RESPONSE
    assert (dropped.differing, dropped.count) == (2 * PROMPT, 2 * PROMPT)
    assert dropped.largest == pytest.approx(1.0)


def first_answer(array: Array) -> None:
    array[:PROMPT] += 1.0


def last_answer(array: Array) -> None:
    prompts(array)
    array[-2] += 1e-3


@pytest.mark.parametrize("change", [first_answer, last_answer])
def test_a_token_that_is_handed_on_differs_all_the_same(change: Change) -> None:
    narrow = handed_on.narrowed(found(change), "values")
    assert narrow is not None and narrow[0]["values"].max_abs > 5e-4


def test_what_no_update_was_given_has_no_part_that_is_dropped() -> None:
    assert handed_on.narrowed(found(prompts, given=False), "values") is None


def test_what_was_given_must_be_that_part_on_either_side() -> None:
    """Values of which the target was given others, whichever: what it used is not known."""
    known = found(prompts)
    others = {s: v + 1e-3 for s, v in handed(values()).items()}
    known["given_values"] = difference("given_values", handed(values()), others)
    assert handed_on.narrowed(known, "values") is None


def test_a_sample_that_was_not_given_may_be_used_whole() -> None:
    known = found(prompts)
    one = {"a": handed(values())["a"]}
    known["given_values"] = difference("given_values", one, one)
    assert handed_on.narrowed(known, "values") is None


def test_what_is_not_finite_anywhere_is_not_dropped() -> None:
    def change(array: Array) -> None:
        array[0] = np.nan

    assert handed_on.narrowed(found(change), "values") is None


def test_what_the_stage_handed_back_otherwise_is_held_as_it_is() -> None:
    known = found(prompts)
    known["handed_values"] = difference("handed_values", values(), values(first_answer))
    narrow = handed_on.narrowed(known, "values")
    assert narrow is not None and set(narrow[0]) == {"values"}
