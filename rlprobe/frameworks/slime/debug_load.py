"""Reading what ``torch.save`` wrote without running anything that stands in it.

torch's restricted unpickler makes tensors and plain containers; here it also makes numpy arrays and
numpy scalars of numbers and texts. Objects of any other class become :class:`Foreign`, which knows
its name and nothing else: no code of theirs is imported or called.
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: Kinds of numpy dtypes whose scalars are numbers or texts.
_PLAIN = "biufcSU"


class Foreign:
    """What stands for an object of a class that is not loaded."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Foreign:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """What it was made of is not looked at."""

    def __setstate__(self, state: Any) -> None:
        """Nor what it held."""

    @classmethod
    def name(cls) -> str:
        return f"{cls.__module__}.{cls.__qualname__}"


def load(path: str | os.PathLike[str]) -> Any:
    """What the file holds, objects of foreign classes as :class:`Foreign`.

    Raises:
        OSError, RuntimeError, ValueError, …: it is damaged, as torch says it.
        pickle.UnpicklingError: it holds what no restricted unpickler reads.
    """
    known = _numpy()
    try:
        return _loaded(path, known)
    except pickle.UnpicklingError:
        # torch 2.5 cannot list the names; there the file stays refused
        listed = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
        if listed is None:
            raise
        with torch.serialization.safe_globals(known):
            names = listed(path)
        if not names:
            raise
        return _loaded(path, [*known, *(_foreign(name) for name in names)])


def _loaded(path: str | os.PathLike[str], known: list[Any]) -> Any:
    with torch.serialization.safe_globals(known):
        return torch.load(path, map_location="cpu", weights_only=True)


def _foreign(name: str) -> type[Foreign]:
    module, _, own = name.rpartition(".")
    return type(own, (Foreign,), {"__module__": module})


def _numpy() -> list[Any]:
    """What numpy's arrays and scalars of numbers need; numpy 1 and 2 name some differently."""
    core = importlib.import_module(
        "numpy._core.multiarray" if np.__version__[0] != "1" else "numpy.core.multiarray"
    )
    make = core._reconstruct
    dtypes = dict.fromkeys(type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDSU")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    # before 2.6 torch knows an object by its own name only
    both = [(make, f"numpy.{name}.multiarray._reconstruct") for name in ("core", "_core")]
    scalars = [_named(f"numpy.{name}.multiarray") for name in ("core", "_core")]
    return [
        np.ndarray,
        np.dtype,
        set,
        frozenset,
        _codecs_encode(),
        *scalars,
        *(both if version >= (2, 6) else [make]),
        *dtypes,
    ]


def _named(module: str) -> Callable[..., Any]:
    """numpy's constructor of scalars, for dtypes without objects in them, under numpy's name."""

    def scalar(dtype: Any, data: Any = b"") -> Any:
        if not isinstance(dtype, np.dtype) or dtype.kind not in _PLAIN:
            raise pickle.UnpicklingError(f"a numpy scalar of {dtype!r:.60} is no number or text")
        raw = data.encode("latin1") if isinstance(data, str) else bytes(data)
        if len(raw) != dtype.itemsize:
            raise pickle.UnpicklingError(f"a numpy scalar of {dtype} has {len(raw)} bytes")
        return np.frombuffer(raw, dtype, 1)[0] if raw else dtype.type()

    scalar.__module__, scalar.__qualname__ = module, "scalar"
    return scalar


def _codecs_encode() -> Any:
    """Which old pickles call to make bytes of a text."""
    import _codecs

    return _codecs.encode
