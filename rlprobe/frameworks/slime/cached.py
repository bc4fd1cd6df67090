"""Each stage computes what Megatron's modules would remember of an earlier one.

Megatron keeps the rotary embedding of a length (``functools.lru_cache`` on the module's method), so
that only the first stage that runs makes its calls: the numbers in the names of all later calls of
the same kind (``Tensor.__mul__.7``) would depend on which stages ran before.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def forget(chunks: Iterable[nn.Module]) -> None:
    """Empty the caches that the classes of these modules keep of their methods' results."""
    classes = {
        base for chunk in chunks for module in chunk.modules() for base in type(module).__mro__
    }
    for cls in classes:
        for value in vars(cls).values():
            clear = getattr(value, "cache_clear", None)
            if callable(clear):
                clear()
