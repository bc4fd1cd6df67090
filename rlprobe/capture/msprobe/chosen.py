"""Capturing some modules only: a module is named by its path and brings everything inside it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from rlprobe.capture.names import named_modules

#: What msprobe puts behind a module's or an API's name (mindstudio-probe 26).
_CALL = re.compile(r"\.(forward|backward|parameters_grad)(\.\d+)?$")


class Modules:
    """The chosen paths.

    Args:
        paths: Hugging Face paths without wrappers; none chooses everything.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)

    def __bool__(self) -> bool:
        return bool(self._paths)

    def __contains__(self, path: str) -> bool:
        """Whether a module is captured: it is chosen, or inside one that is."""
        if not self._paths:
            return True
        while path not in self._paths:
            path, dot, _ = path.rpartition(".")
            if not dot:
                return "" in self._paths or path in self._paths
        return True


class ModuleScope:
    """msprobe's ``scope``, which decides by name what is collected, for chosen modules.

    msprobe's own lists match any part of a name, and find neither the modules inside a chosen one
    nor, at L1, anything at all: an API's name does not say where it was called. Here hooks on the
    chosen modules know when one is under way.

    Args:
        chosen: the paths, at least one.
        models: the model or its chunks.
        as_list: whether msprobe names modules with a chunk number.
    """

    def __init__(self, chosen: Modules, models: list[nn.Module], as_list: bool) -> None:
        wanted = [module for _, path, module in named_modules(models) if path in chosen]
        ids = {id(module) for module in wanted}
        self.found = len(wanted)
        self._records: set[str] = set()
        for index, model in enumerate(models):
            chunk = f"{index}." if as_list or len(models) > 1 else ""
            for raw, module in model.named_modules():
                if id(module) in ids:
                    self._records.add(f"Module.{chunk}{raw}")
        self._open = 0
        self._calls: set[str] = set()
        self._handles: list[Any] = []
        for module in wanted:
            self._handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def check(self, name: str) -> bool:
        """Whether msprobe collects the record of this name."""
        bare = _CALL.sub("", name)
        if bare.startswith("Module."):
            return bare.rpartition(".")[0] in self._records  # less the class
        if name.endswith(".backward"):
            return bare in self._calls
        if self._open:
            self._calls.add(bare)
        return self._open > 0

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._open += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._open -= 1
