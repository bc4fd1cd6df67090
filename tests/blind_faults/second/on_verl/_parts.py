"""What several faults of this set replace."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rlprobe.faults.patching import swapped


def file_of(module: Any) -> Any:
    """The file of transformers that a module's class is written in."""
    return sys.modules[type(module).__module__]


@contextlib.contextmanager
def rotary_of(module: Any, wrong: Callable[..., Any]) -> Iterator[None]:
    """Let one attention module turn by ``wrong(right, query, key, cos, sin)``."""
    file = file_of(module)
    turn, attend = file.apply_rotary_pos_emb, module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with swapped(file, "apply_rotary_pos_emb", functools.partial(wrong, turn)):
            return attend(*args, **kwargs)

    with swapped(module, "forward", forward):
        yield


def tiles(length: int, width: int) -> Iterator[slice]:
    """Slices of ``width``, the last one shorter."""
    for first in range(0, length, width):
        yield slice(first, min(first + width, length))


def spread(heads: Any, times: int) -> Any:
    """A key or value head for every query head."""
    return heads[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
