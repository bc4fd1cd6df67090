"""Which tokens of the engine's prefill are which of the training passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlprobe.compare.stage_sources import Process
from rlprobe.compare.traininfer.passes import Grid, Pass
from rlprobe.dumps.key_data import MicroBatch
from rlprobe.rollouts.digest import sample_digest

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in one row of a pass."""

    row: int
    start: int
    stop: int
    #: Position of the first of them in its sequence.
    position: int = 0

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Matched:
    """Tokens of an engine's pass, and the same tokens of a training pass."""

    inference: Span
    #: Index into the training passes.
    training: int
    span: Span
    #: Whether the engine generated them: they are forwards of single tokens on its cache.
    decoded: bool = False


def sequences(grid: Grid) -> list[Span]:
    """The sequences of a training pass: rows without their left padding, or parts of packed rows.

    Right padding stays in: a sequence is only ever compared from its beginning.
    """
    found = []
    for row in range(grid.rows):
        starts = _starts(grid, row)
        stops = [*starts[1:], grid.length]
        found += [Span(row, a, b) for a, b in zip(starts, stops, strict=True) if b > a]
    return found


def with_starts(p: Pass, batch: MicroBatch | None) -> Pass:
    """The pass with the places where its packed samples begin.

    Megatron packs samples into one row, whose bounds are no tensor of any module; the key data of
    the micro-batch has the samples' lengths. They are taken only where every sample is in its
    place, token by token.
    """
    if batch is None or p.grid.rows != 1 or p.grid.positions is not None or batch.valid is not None:
        return p
    starts, at = [], 0
    for sample, prompt, response in zip(batch.samples, batch.prompts, batch.responses, strict=True):
        tokens = p.grid.ids[0, at : at + prompt + response]
        if sample_digest(tokens[:prompt], tokens[prompt:]) != sample:
            return p
        starts.append(at)
        at += prompt + response
    return replace(p, grid=replace(p.grid, starts=tuple(starts)))


def _starts(grid: Grid, row: int) -> list[int]:
    if grid.starts is not None:
        return list(grid.starts)
    if grid.positions is not None:
        positions = grid.positions[row]
        zero = positions == 0
        # padding has position 0 as well: a sequence begins where 1 follows, or at the very end
        following = np.append(positions[1:], 1)
        starts = np.flatnonzero(zero & (following == 1))
        if len(starts):
            return [int(start) for start in starts]
    ids = grid.ids[row]
    other = np.flatnonzero(ids != ids[0])
    run = int(other[0]) if len(other) else 0
    # a run of one token in front is padding, or the sequence's own first tokens
    return [0] if run <= 1 else [0, run]


def prompts(grid: Grid) -> Iterator[Span]:
    """The prompts, or chunks of prompts, of an engine's pass; generated tokens are left out."""
    for row in range(grid.rows):
        if grid.positions is None:
            yield Span(row, 0, grid.length)
            continue
        positions = grid.positions[row]
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        for start, stop in zip([0, *breaks.tolist()], [*breaks.tolist(), grid.length], strict=True):
            first = int(positions[start])
            # one token that is not the first was generated before (or is a chunk of one: no loss)
            if first == 0 or stop - start > 1:
                yield Span(row, start, stop, first)


def histories(inference: Sequence[Pass]) -> list[Integers | None]:
    """By engine pass, all tokens that the sequence of its last token has up to it.

    An engine that serves one request at a time, as it does in captured steps, goes on with the
    sequence of the pass before. None where a pass holds several sequences, or begins in the middle
    of one that was not seen.
    """
    found: list[Integers | None] = []
    before: dict[Process, Integers] = {}
    for p in inference:
        known: Integers | None = None
        positions = p.grid.positions
        if p.grid.rows == 1 and positions is not None and bool((np.diff(positions[0]) == 1).all()):
            first, last = int(positions[0, 0]), before.get(p.process)
            if first == 0:
                known = p.grid.ids[0]
            elif last is not None and len(last) == first:
                known = np.concatenate([last, p.grid.ids[0]])
        found.append(known)
        if known is None:
            before.pop(p.process, None)
        else:
            before[p.process] = known
    return found


def match(inference: Sequence[Pass], training: Sequence[Pass]) -> list[list[Matched]]:
    """By engine pass, the tokens that a training pass has as well.

    A prompt sampled several times is several equal sequences; they are taken in turn. A generated
    token is known by all tokens before it.
    """
    known = [(number, p, span) for number, p in enumerate(training) for span in sequences(p.grid)]
    taken: dict[tuple[int, int, bytes], int] = defaultdict(int)
    indexed: dict[tuple[int, int], dict[bytes, list[tuple[int, Span]]]] = {}
    result = []
    for p, history in zip(inference, histories(inference), strict=True):
        found = []
        if history is not None and p.grid.length == 1 and len(history) > 1:
            result.append(_decoded(history, known, indexed))
            continue
        for span in prompts(p.grid):
            for part in _parts(p, span, known):
                size = (part.position, len(part))
                if size not in indexed:
                    indexed[size] = _index(known, *size)
                content = p.grid.ids[part.row, part.start : part.stop].tobytes()
                candidates = indexed[size].get(content, [])
                if not candidates:
                    continue
                wanted = (*size, content)
                turn = taken[wanted]
                taken[wanted] += 1
                number, whole = candidates[turn % len(candidates)]
                begin = whole.start + part.position
                same = Span(whole.row, begin, begin + len(part), part.position)
                found.append(Matched(part, number, same))
        result.append(found)
    return result


def _decoded(
    history: Integers,
    known: Sequence[tuple[int, Pass, Span]],
    indexed: dict[tuple[int, int], dict[bytes, list[tuple[int, Span]]]],
) -> list[Matched]:
    """The token that one forward on the cache was given; any sequence with its history has it."""
    at = len(history) - 1
    size = (0, len(history))
    if size not in indexed:
        indexed[size] = _index(known, *size)
    candidates = indexed[size].get(history.tobytes(), [])
    if not candidates:
        return []
    number, whole = candidates[0]
    place = whole.start + at
    return [Matched(Span(0, 0, 1, at), number, Span(whole.row, place, place + 1, at), decoded=True)]


def _parts(p: Pass, span: Span, known: Sequence[tuple[int, Pass, Span]]) -> Iterator[Span]:
    """A span whose positions are not known, cut where one known sequence's beginning ends."""
    if p.grid.positions is not None:
        yield span
        return
    ids = p.grid.ids[span.row]
    at = span.start
    while at < span.stop:
        longest = max((_common(ids[at : span.stop], q, s) for _, q, s in known), default=0)
        if not longest:
            return
        yield Span(span.row, at, at + longest)
        at += longest


def _common(ids: Integers, p: Pass, span: Span) -> int:
    """Tokens that a sequence and ``ids`` have in common at their beginnings."""
    own = p.grid.ids[span.row, span.start : span.stop][: len(ids)]
    differing = np.flatnonzero(own != ids[: len(own)])
    return int(differing[0]) if len(differing) else len(own)


def _index(
    known: Sequence[tuple[int, Pass, Span]], position: int, length: int
) -> dict[bytes, list[tuple[int, Span]]]:
    """Sequences by so many of their tokens from a position on."""
    found: dict[bytes, list[tuple[int, Span]]] = defaultdict(list)
    for number, p, span in known:
        begin = span.start + position
        if begin + length <= span.stop:
            content = p.grid.ids[span.row, begin : begin + length].tobytes()
            found[content].append((number, span))
    return found
