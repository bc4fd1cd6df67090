"""Responses that no policy should give: loops, garbled text, none at all, cut at the limit.

An engine that decodes wrongly seldom stops: it repeats a piece for ever, or draws tokens that are
no text. None of that is an error to anybody, and training goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlprobe.rollouts.model import Ragged, Rollouts

#: A loop is a piece of at most so many tokens that ends the response, repeated so often at least,
#: and together at least so many tokens and so much of the response.
PERIOD, TIMES, TOKENS, SHARE = 32, 4, 16, 0.5
#: Share of a text's characters that are none (U+FFFD, controls) from which on it is garbled.
GARBLED = 0.25
_SPACE = "\n\r\t"


@dataclass(frozen=True)
class Responses:
    """What is odd about a step's responses: ids of samples."""

    count: int
    empty: tuple[str, ...]
    #: Ends in a piece that repeats.
    looping: tuple[str, ...]
    #: Much of its text is no text; None where texts were not recorded.
    garbled: tuple[str, ...] | None
    #: As long as responses may be, so that it may not have ended; None where that is not known.
    cut: tuple[str, ...] | None


def look(rollouts: Rollouts) -> Responses | None:
    """Look at a step's responses; None where their tokens were not recorded."""
    rows = _tokens(rollouts)
    if rows is None:
        return None
    limit = rollouts.sampling.get("response_length")
    named = list(zip(rollouts.samples, rows, strict=True))
    texts = any(sample.response_text for sample in rollouts.samples)
    return Responses(
        count=len(named),
        empty=tuple(sample.id for sample, row in named if not len(row)),
        looping=tuple(sample.id for sample, row in named if loops(row)),
        garbled=tuple(s.id for s in rollouts.samples if garbled(s.response_text))
        if texts
        else None,
        cut=tuple(sample.id for sample, row in named if len(row) >= limit)
        if isinstance(limit, int)
        else None,
    )


def loops(tokens: Sequence[int] | np.ndarray) -> bool:
    """Whether a response ends in a piece that repeats."""
    row = np.asarray(tokens)
    for period in range(1, min(PERIOD, len(row) // TIMES) + 1):
        # from the end back, as far as each token is the one a period before it
        same = row[period:] == row[:-period]
        run = len(same) if same.all() else int(np.argmin(same[::-1]))
        length = run + period if run else 0
        if length >= max(TOKENS, TIMES * period, SHARE * len(row)):
            return True
    return False


def garbled(text: str) -> bool:
    """Whether much of a text is no text."""
    odd = sum(
        character == "\N{REPLACEMENT CHARACTER}"
        or not (character.isprintable() or character in _SPACE)
        for character in text
    )
    return bool(text) and odd / len(text) >= GARBLED


def _tokens(rollouts: Rollouts) -> list[np.ndarray] | None:
    """Valid tokens of each response."""
    found = rollouts.tensors.get("responses")
    if isinstance(found, Ragged):
        return [found.row(number) for number in range(len(found))]
    mask = rollouts.tensors.get("attention_mask")
    if found is None or mask is None or isinstance(mask, Ragged) or found.ndim != 2:
        return None
    valid = mask[:, -found.shape[1] :].astype(bool)
    return [row[keep] for row, keep in zip(found, valid, strict=True)]
