"""Are tokens that alone differ told from those that differ all along their sequences?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.diagnose.cause.around import Scene, few_tokens
from rlprobe.judge import origin, tokens
from rlprobe.judge.tokens import Few, Profile
from rlprobe.said import exactly

RANDOM = np.random.default_rng(0)


def lines(*touched: dict[int, float], length: int = 12, noise: float = 0.0) -> list[Any]:
    """Errors of sequences' tokens: those given, the rest round-off."""
    made = []
    for sequence in touched:
        errors = noise * RANDOM.random(length)
        for at, error in sequence.items():
            errors[at] = error
        made.append(errors)
    return made


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize(
    ("touched", "found"),
    [
        # packed rows leak into the next: its first tokens, and the first row is as it was
        (({}, {0: 0.5, 1: 0.5, 2: 0.5}, {0: 0.5, 1: 0.5, 2: 0.5}), (0, 2, 2, 3)),
        (({11: 0.5}, {11: 0.5}), (11, 11, 2, 2)),
        (({4: 0.5}, {}, {6: 0.5}), (4, 6, 2, 3)),
    ],
)
def test_few_neighbouring_tokens_alone(
    touched: tuple[dict[int, float], ...], found: tuple[int, int, int, int], noise: float
) -> None:
    few = tokens.few(lines(*touched, noise=noise))
    assert few is not None
    assert (few.first, few.last, few.sequences, few.of) == found
    assert few.size == pytest.approx(0.5)


@pytest.mark.parametrize(
    "touched",
    [
        [dict.fromkeys(range(12), 0.1)],
        [{0: 0.5, 11: 0.5}, {}],  # both ends: what lies between is most of the sequence
        [dict.fromkeys(range(4, 12), 0.5), dict.fromkeys(range(4, 12), 0.5)],
        [{0: 0.5, **dict.fromkeys(range(1, 12), 0.01)}],  # the rest differs too, if by less
        [{}, {}],
    ],
)
def test_what_differs_all_along_is_not_few(touched: list[dict[int, float]]) -> None:
    assert tokens.few(lines(*touched)) is None


@pytest.mark.parametrize(
    ("few", "said"),
    [
        (Few(0, 2, 3, 4, 0.48), "only tokens 0 to 2 differ, in 3 of 4 sequences, by 0.48 of their"),
        (Few(7, 7, 4, 4, 0.1), "only token 7 differs, in 4 of 4 sequences, by 0.1 of their own"),
        (None, ""),
    ],
)
def test_they_are_said_in_words(few: Few | None, said: str) -> None:
    stands: Any = None
    here = origin.Origin(origin.MODULE, "conv", "Conv1d", {}, exactly(""))
    text = "; ".join(few_tokens(Scene(stands, stands, here, profile=Profile(1, 1, None, few))))
    assert text.startswith(said) and bool(text) == bool(said)


@pytest.mark.parametrize("count", [1, 3])
def test_of_joined_tokens_of_a_block(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As sketches of tokens have it: positions count from the start of each sequence."""
    rows = [
        {"name": "Module.layers.0.Block.forward.0.output.0", "order": 5, "sample": f"s{n}",
         "occurrence": 0, "token": at, "error": 0.5 if at < count and n else 0.0}
        for n in range(3) for at in range(10)
    ]  # fmt: skip
    monkeypatch.setattr(tokens, "_tokens", lambda *_: pl.DataFrame(rows))
    results: Any = None
    profile = tokens.profile(results, "actor_update", 0, None, 3)
    assert profile is not None and profile.few == Few(0, count - 1, 2, 3, 0.5)
    assert (profile.first == float("inf")) == (count == 1)
