"""Ranks of one model hold the same samples: tensor- and pipeline-parallel ones.

Each of them says which samples it worked on, and may write the same key data. Where the sides have
other numbers of them, one of each data-parallel rank counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rlprobe import stages

if TYPE_CHECKING:
    from rlprobe.store.manifest import Process
    from rlprobe.store.read import Run

Item = TypeVar("Item")


def processes(run: Run, stage: str) -> list[Process]:
    """Where the training processes stand that run a stage's model."""
    role = stages.MODEL_ROLE.get(stage)
    own = [process for process in run.manifest.layout if process.role == role]
    return own or list(run.manifest.layout)


def data_ranks(run: Run, stage: str) -> dict[int, int]:
    """By rank, the data-parallel rank that it is of; one that nothing is said of is its own."""
    return {
        process.rank: process.rank if process.dp_rank is None else process.dp_rank
        for process in processes(run, stage)
    }


def alternatives(
    items: Iterable[Item], rank: Callable[[Item], int], of: Mapping[int, int]
) -> list[list[Item]]:
    """What a side would have with one replica of each data-parallel rank, for every replica.

    Args:
        items: in their order.
        rank: of an item.
        of: see :func:`data_ranks`.

    Returns:
        As many lists as the data-parallel rank of the most replicas has; one at least.
    """
    every = list(items)
    held: dict[int, list[int]] = {}
    for item in every:
        here = rank(item)
        own = held.setdefault(of.get(here, here), [])
        if here not in own:
            own.append(here)
    most = max(map(len, held.values()), default=1)
    found = []
    for number in range(most):
        chosen = {sorted(own)[min(number, len(own) - 1)] for own in held.values()}
        found.append([item for item in every if rank(item) in chosen])
    return found


def first(items: Iterable[Item], rank: Callable[[Item], int], of: Mapping[int, int]) -> list[Item]:
    """The items of the first replica of each data-parallel rank."""
    return alternatives(items, rank, of)[0]


def most(run: Any, stage: str) -> int:
    """How many ranks hold the samples of one data-parallel rank."""
    of = data_ranks(run, stage)
    held = list(of.values())
    return max((held.count(one) for one in held), default=1)
