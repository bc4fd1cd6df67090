"""Responses that no policy should give: loops, garbled text, none at all, cut at the limit.

An engine that decodes wrongly seldom stops: it repeats a piece for ever, or draws tokens that are
no text. None of that is an error to anybody, and training goes on with it. What is looked for is
seen in the response itself: words that are plain and make no sense together are not, which the
engine's log-probs against training's show.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlprobe.rollouts.model import Ragged, Rollouts

#: A piece of so many tokens repeats if it stands in the response so often one after the other, at
#: distances that differ by so much at most. What is between may change (a counter), and may be of
#: any length; common words of a small vocabulary come back at any distance.
PIECE, TIMES, EVEN = 8, 4, 0.25
#: A response loops if so much of it, and so many tokens at least, stand in pieces that repeat; or
#: so many of its last tokens all do, whatever came before.
SHARE, TOKENS, TAIL = 0.5, 16, 128
#: Share of a text's characters that are none (U+FFFD, controls) from which on it is garbled.
GARBLED = 0.25
#: Letters of so many scripts, each so much of all letters at least: no language is written so.
SCRIPTS, OF_LETTERS = 4, 0.05
_SPACE = "\n\r\t"
#: What special tokens look like in a text: an end of text is a token, and says nothing.
_MARKS = re.compile(r"<[^<>\s]{1,40}>")
#: Scripts that are written together: Japanese has three, and formulas their own Latin and Greek.
_TOGETHER = {
    "HIRAGANA": "CJK", "KATAKANA": "CJK", "HANGUL": "CJK", "BOPOMOFO": "CJK", "HALFWIDTH": "CJK",
    "KATAKANA-HIRAGANA": "CJK", "FULLWIDTH": "LATIN", "MATHEMATICAL": "LATIN", "GREEK": "LATIN",
    "MODIFIER": "LATIN", "SUPERSCRIPT": "LATIN", "SUBSCRIPT": "LATIN", "FEMININE": "LATIN",
    "MASCULINE": "LATIN", "SCRIPT": "LATIN", "DOUBLE-STRUCK": "LATIN", "BLACK-LETTER": "LATIN",
    "MICRO": "LATIN", "OHM": "LATIN", "KELVIN": "LATIN", "ANGSTROM": "LATIN",
}  # fmt: skip


@dataclass(frozen=True)
class Responses:
    """What is odd about a step's responses: ids of samples."""

    count: int
    #: No tokens, or no text but blanks and special tokens.
    empty: tuple[str, ...]
    #: Made up of pieces that repeat, or ending in them.
    looping: tuple[str, ...]
    #: Much of its text is no text, or of no language; None where texts were not recorded.
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
        empty=tuple(s.id for s, row in named if not len(row) or (texts and blank(s.response_text))),
        looping=tuple(sample.id for sample, row in named if loops(row)),
        garbled=tuple(s.id for s in rollouts.samples if garbled(s.response_text))
        if texts
        else None,
        cut=tuple(sample.id for sample, row in named if len(row) >= limit)
        if isinstance(limit, int)
        else None,
    )


def loops(tokens: Sequence[int] | np.ndarray) -> bool:
    """Whether a response is made up of pieces that repeat, or ends in them."""
    row = np.asarray(tokens).astype(np.uint64)
    if len(row) < TOKENS:
        return False
    repeats = _repeats(row)
    begins = np.zeros(len(row) + 1, dtype=np.int64)
    np.add.at(begins, repeats, 1)
    np.add.at(begins, repeats + PIECE, -1)
    repeated = np.cumsum(begins[:-1]) > 0
    most = int(repeated.sum()) >= max(TOKENS, SHARE * len(row))
    return most or (len(row) >= TAIL and bool(repeated[-TAIL:].all()))


def _repeats(row: np.ndarray) -> np.ndarray:
    """Where pieces begin that repeat."""
    # two pieces with one sum are one piece, but for one in 2**64 pairs
    windows = np.lib.stride_tricks.sliding_window_view(row + np.uint64(1), PIECE)
    sums = windows @ _FACTORS
    order = np.argsort(sums, kind="stable")
    apart = np.diff(order)
    apart[np.diff(sums[order]) != 0] = -1  # another piece
    if len(apart) < TIMES - 1:
        return np.empty(0, dtype=np.int64)
    gaps = np.lib.stride_tricks.sliding_window_view(apart, TIMES - 1)
    least = gaps.min(axis=1)
    even = (least > 0) & (gaps.max(axis=1) <= np.maximum(least + 1, (1 + EVEN) * least))
    first = np.flatnonzero(even)
    return np.unique(order[(first[:, None] + np.arange(TIMES)).ravel()])


#: Odd numbers without a pattern: sums of products modulo 2**64 tell pieces apart.
_FACTORS = np.random.Generator(np.random.PCG64(1)).integers(
    0, 2**63, PIECE, dtype=np.uint64
) * np.uint64(2) + np.uint64(1)


def garbled(text: str) -> bool:
    """Whether much of a text is no text, or of no language."""
    odd = sum(
        character == "\N{REPLACEMENT CHARACTER}"
        or not (character.isprintable() or character in _SPACE)
        for character in text
    )
    return bool(text) and (odd / len(text) >= GARBLED or _mixed(text))


def blank(text: str) -> bool:
    """Whether a text has nothing but blanks and special tokens."""
    return not _MARKS.sub("", text).strip()


def _mixed(text: str) -> bool:
    """Whether a text's letters are of more scripts than any language has."""
    if text.isascii():
        return False
    found = Counter(_script(character) for character in text if character.isalpha())
    least = OF_LETTERS * found.total()
    return sum(count >= least for count in found.values()) >= SCRIPTS


def _script(letter: str) -> str:
    """The script of a letter, as the first word of its name."""
    first = unicodedata.name(letter, "UNKNOWN").partition(" ")[0]
    return _TOGETHER.get(first, first)


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
