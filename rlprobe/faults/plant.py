"""Load a fault from ``FILE:NAME`` and plant it around a stage."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlprobe.errors import ConfigError
from rlprobe.faults.declare import Declaration, Plant, Site, declaration

_ENDED = object()

#: Plants a fault in any run.
ENV = "RLPROBE_FAULT"


def split(reference: str) -> tuple[Path, str]:
    """The file and the name in ``FILE:NAME``.

    Raises:
        ConfigError: no colon, or no such file.
    """
    file, separator, name = reference.rpartition(":")
    if not separator or not file or not name:
        raise ConfigError(f"fault {reference!r} is not of the form FILE:NAME")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"fault file {path} does not exist (from {reference!r})")
    return path, name


def load_file(path: Path) -> dict[str, tuple[Plant, Declaration]]:
    """Every declared fault and benign change of a Python file, by name.

    Raises:
        ConfigError: the file cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(f"_rlprobe_fault_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"fault file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # registered, as dataclasses look their module up, and beside its own helpers
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"fault file {path}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"fault file {path} fails on import: {error!r}") from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    found = {}
    for value in vars(module).values():
        declared = declaration(value)
        if declared is not None:
            found[declared.name] = (value, declared)
    return found


@functools.lru_cache(maxsize=8)
def load(reference: str) -> tuple[Plant, Declaration]:
    """The fault that ``FILE:NAME`` names.

    Raises:
        ConfigError: the file or the name does not exist; the message lists what does.
    """
    path, name = split(reference)
    found = load_file(path)
    if name not in found:
        raise ConfigError(
            f"{path} declares no fault or benign change {name!r}; "
            f"it declares: {', '.join(sorted(found)) or 'none'}"
        )
    return found[name]


def reference_of(configured: str | None) -> str | None:
    """``RLPROBE_FAULT`` where it is set, else the configured fault."""
    return os.environ.get(ENV) or configured


@contextlib.contextmanager
def planted(reference: str | None, site: Site, from_step: int = 0) -> Iterator[None]:
    """Plant the fault for one stage; it is taken out again whatever happens in between.

    Args:
        reference: ``FILE:NAME``; None for nothing.
        site: the stage that is about to run.
        from_step: the first step with the fault in it.

    Raises:
        ConfigError: there is no such fault, or it does not yield exactly once.
    """
    if reference is None or site.step < from_step:
        yield
        return
    plant, declared = load(reference)
    if declared.stage not in (None, site.stage):
        yield
        return
    generator: Any = plant(site)
    if not isinstance(generator, Iterator):
        raise ConfigError(f"{reference}: {declared.name} has no yield: it must yield exactly once")
    if next(generator, _ENDED) is _ENDED:
        raise ConfigError(f"{reference}: {declared.name} ended before its yield")
    try:
        yield
    finally:
        if next(generator, _ENDED) is not _ENDED:
            raise ConfigError(f"{reference}: {declared.name} yields more than once")
