"""Which part of training's tensor a tensor-parallel rank of the engine has.

As the column- and row-parallel layers of Megatron, vLLM and SGLang divide: each of the parts of a
fused projection into as many consecutive pieces as there are ranks, rank r having the r-th of each.
Where there are fewer key and value heads than ranks, ``ranks / heads`` consecutive ranks have the
same ones (``num_kv_head_replicas`` of vLLM's and SGLang's ``QKVParallelLinear``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rlprobe.dumps.tensors.dtypes import Array

#: Classes of both engines whose inputs or outputs are divided among ranks.
_DIVIDED = re.compile(r"ParallelLinear\b")
#: Classes of both engines with a row a token, padded to a multiple (``pad_vocab_size``).
_VOCABULARY = re.compile(r"\b(VocabParallelEmbedding|ParallelLMHead)\b")


def says_ranks(name: str) -> bool:
    """Whether a record of the engine, by its name, is of a layer that is divided."""
    return _DIVIDED.search(name) is not None


def is_vocabulary(name: str) -> bool:
    """Whether a record of the engine, by its name, has a row a token of a padded vocabulary."""
    return _VOCABULARY.search(name) is not None


def ranks(widths: Iterable[tuple[int, int]]) -> int:
    """How many ranks the engine's tensors are divided among; 1 where nothing says that they are.

    Args:
        widths: values in the engine and in training of records that :func:`says_ranks`. Most of
            them are divided by the number of ranks; key and value heads may be by less.
    """
    ratios = Counter(
        whole // piece for piece, whole in widths if piece and whole > piece and whole % piece == 0
    )
    if not ratios:
        return 1
    most = max(ratios.values())
    return max(ratio for ratio, count in ratios.items() if count == most)


def divided(parts: Sequence[int], module: str, halves: frozenset[str]) -> list[int]:
    """The parts that are divided each by itself.

    Args:
        parts: widths of training's parts.
        module: its path.
        halves: what modules of two equal parts are called, such as ``gate_up_proj``.
    """
    if len(parts) == 1 and parts[0] % 2 == 0 and halves.intersection(module.split(".")):
        return [parts[0] // 2] * 2
    return list(parts)


def piece(whole: Array, parts: Sequence[int], width: int, rank: int, size: int) -> Array:
    """The columns of ``whole`` that one rank has.

    Args:
        whole: training's values, shape [rows, sum of ``parts``].
        parts: widths of the parts that are divided each by itself.
        width: how many columns the rank has.
        rank, size: its number in the tensor-parallel group, and how many it has.

    Raises:
        ValueError: no division of the parts makes ``width`` columns.
    """
    found, start = [], 0
    for part, own in zip(parts, _own(parts, width, size), strict=True):
        copies = size // (part // own)
        first = start + rank // copies * own
        found.append(whole[:, first : first + own])
        start += part
    return np.concatenate(found, axis=1)


def _own(parts: Sequence[int], width: int, size: int) -> list[int]:
    """Columns of each part that a rank has."""
    if all(part % size == 0 for part in parts) and sum(parts) == width * size:
        return [part // size for part in parts]
    # the first part is divided by all ranks (or it is one that is not), the others by their heads
    first = [parts[0] // size] if len(parts) > 1 and parts[0] % size == 0 else []
    rest = parts[len(first) :]
    each, over = divmod(width - sum(first), len(rest))
    if over or each < 1 or any(part % each or size % (part // each) for part in rest):
        raise ValueError(
            f"the engine has {width} values of {' + '.join(map(str, parts))} in training, which "
            f"is no division among {size} ranks"
        )
    return [*first, *[each] * len(rest)]
