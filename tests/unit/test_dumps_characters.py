"""Texts of arrays from elsewhere: is what no character has refused, and nothing else?"""

from __future__ import annotations

import numpy as np
import pytest

from rlprobe.dumps import characters


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("number", [0x110000, 0xFFFFFFFF])
def test_a_number_that_is_no_characters_is_refused(order: str, number: int) -> None:
    bad = np.array([97, number], f"{order}u4").view(f"{order}U2")
    with pytest.raises(ValueError, match="characters that there are not"):
        characters.require(bad)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "\U0010ffff"]),
        np.array(["ab", "c"], ">U2")[::-1],
        np.array([], "<U3"),
        np.array([""], "<U0"),
        np.array([0xFFFFFFFF], np.uint32),
        np.array([b"\xff\xff\xff\xff"]),
    ],
    ids=lambda array: array.dtype.str,
)
def test_all_else_is_what_it_was(array: np.ndarray) -> None:
    assert characters.require(array) is array
