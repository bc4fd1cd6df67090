"""Run a callback right after a module has been imported, without importing it ourselves.

A ``sys.meta_path`` finder asks the other finders for the module's spec and shadows ``exec_module``
on that one loader instance. Classes are then changed with ``functools.wraps`` and ``setattr``:
object proxies do not survive the pickling that Ray does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_Callback = Callable[[ModuleType], None]
_wanted: dict[str, list[_Callback]] = {}


class _PostImportFinder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _wanted:
            return None
        for finder in sys.meta_path:
            if finder is _PostImportFinder or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is None or spec.loader is None:
                continue
            _shadow(spec.loader, name)
            return spec
        return None


def _shadow(loader: Any, name: str) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        # source loaders have a __dict__ and take the shadow back; others keep the class method
        loader.__dict__.pop("exec_module", None)
        original(module)
        for callback in _wanted.get(name, ()):
            callback(module)

    loader.exec_module = exec_module


def when_imported(name: str, callback: _Callback) -> None:
    """Call ``callback(module)`` once ``name`` is imported; at once if it already is."""
    _wanted.setdefault(name, []).append(callback)
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
    if _PostImportFinder not in sys.meta_path:
        sys.meta_path.insert(0, _PostImportFinder)
