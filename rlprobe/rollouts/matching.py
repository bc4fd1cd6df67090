"""Which recorded rows answer the prompts that a trainer asks about."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from rlprobe.errors import ReplayError
from rlprobe.rollouts.model import Rollouts

#: Column that numbers the outputs of one session; a recording without it has one output each.
OUTPUT = "output_index"


def sessions(recorded: Rollouts) -> list[list[int]]:
    """Rows of each session (one answer to a prompt), in recorded order.

    An agent loop may put several outputs into one session; they are recorded one after another.
    """
    outputs = recorded.values.get(OUTPUT)
    if outputs is None:
        return [[row] for row in range(len(recorded))]
    found: list[list[int]] = []
    for row, output in enumerate(outputs):
        if output == 0 or not found:
            found.append([])
        found[-1].append(row)
    return found


def match(
    recorded: Rollouts,
    keys: Sequence[str],
    asked: Sequence[str],
    repeats: Sequence[int],
    source: str,
) -> list[list[list[int]]]:
    """The recorded sessions of each prompt asked about.

    Prompts that are asked twice share their sessions out in recorded order.

    Args:
        recorded: one step.
        keys: what tells its rows' prompts apart, one a row.
        asked: the same of each prompt.
        repeats: answers wanted of each prompt.
        source: what the message calls the recording.

    Returns:
        For each prompt its sessions, for each session its rows.

    Raises:
        ReplayError: the numbers of samples or any prompt differ; the message names the rows.
    """
    found = sessions(recorded)
    require_size(len(found), sum(repeats), source)
    waiting: dict[str, collections.deque[list[int]]] = collections.defaultdict(collections.deque)
    for session in found:
        waiting[keys[session[0]]].append(session)
    matched, differing = [], []
    for prompt, (key, count) in enumerate(zip(asked, repeats, strict=True)):
        queue = waiting[key]
        if len(queue) < count:
            differing.append(prompt)
            continue
        matched.append([queue.popleft() for _ in range(count)])
    require_same(differing, len(asked), source)
    return matched


def require_size(recorded: int, asked: int, source: str) -> None:
    """Refuse a batch of another size.

    Raises:
        ReplayError: the numbers differ.
    """
    if recorded != asked:
        raise ReplayError(
            f"{source} holds {recorded} samples, but this step asks for {asked}; "
            "train_batch_size and rollout.n must be those of the collecting run"
        )


def require_same(differing: Sequence[int], rows: int, source: str) -> None:
    """Refuse prompts that were not recorded.

    Raises:
        ReplayError: there are rows that differ.
    """
    if differing:
        raise ReplayError(
            f"the prompts of this step are not those {source} was recorded for: "
            f"{len(differing)} of {rows} rows differ (rows {some(differing)}); use the "
            "same data files, order, seed and batch size as the collecting run"
        )


def some(rows: Sequence[int]) -> str:
    """``0, 1, 2, …`` of rows, for a message."""
    return ", ".join(map(str, rows[:8])) + (", …" if len(rows) > 8 else "")
