"""msprobe's mapping files, as ``msprobe compare`` takes them with -dm, -cm, -lm and -am.

All say what the target's names are called on the benchmark:

- data mapping, ``{record: record}``, and the ``{call: call}`` that msprobe writes of it;
- cell mapping, ``{path.Class: path.Class}``, or parts of such names;
- layer mapping, ``{Class: {child path: child path}}``, from ``TopLayer`` down;
- api mapping, a list of ``{ms_api, pt_api, ms_args, pt_args, ms_output, pt_output, …}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Named
from dataclasses import dataclass, field
from typing import Any

from rlprobe.errors import ConfigError
from rlprobe.logical.wrappers import normalise_path

_RECORD = re.compile(r"\.(?:input|output|kwargs|parameters|parameters_grad|debug)(?:\.|$)")
_CALL = re.compile(r"\.(?:forward|backward)(?:\.\d+)?$")
_NONE = "N/A"
_TOP, _OLD_TOP = "TopLayer", "Cell"
#: Slots of a record, and msprobe's lists of their indices.
_SLOTS = {
    "input": "args",
    "output": "output",
    "parameters": "parameters",
    "grad": "parameters_grad",
}


@dataclass(frozen=True)
class Function:
    """A function of the target that is another's counterpart, argument by argument."""

    target: str
    benchmark: str
    #: Slot -> the target's index -> the benchmark's.
    indices: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Mapping:
    """What the target's names are called on the benchmark."""

    records: dict[str, str] = field(default_factory=dict)
    calls: dict[str, str] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    functions: tuple[Function, ...] = ()
    #: Entries that any of the target's names met, of all processes.
    used: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def entries(self) -> tuple[str, ...]:
        """What :attr:`used` may hold, in the order of the file."""
        layers = [_layer(kind, child) for kind, table in self.layers.items() for child in table]
        functions = [function.target for function in self.functions]
        return (*self.records, *self.calls, *self.modules, *layers, *functions)

    def record(self, name: str) -> str | None:
        """The benchmark's name of a record, where it is mapped by itself or by its call."""
        if name in self.records:
            self.used.add(name)
            return self.records[name]
        for match in _BEFORE.finditer(name):
            call = self.calls.get(name[: match.end()])
            if call is not None:
                self.used.add(name[: match.end()])
                return call + name[match.end() :]
        return None

    def module(self, path: str, kind: str, classes: Named[str, str]) -> tuple[str, str] | None:
        """The benchmark's path and class of a module; None where nothing maps it.

        Args:
            path: its path, without wrappers.
            kind: its class.
            classes: of all modules of the target, by path.
        """
        name = f"{path}.{kind}"
        mapped = self.modules.get(name)
        if mapped is not None:
            self.used.add(name)
        else:
            mapped = name
            for old, new in self.modules.items():
                if old in mapped:
                    self.used.add(old)
                    mapped = mapped.replace(old, new, 1)
        new_path, _, new_kind = mapped.rpartition(".")
        walked = self._layered(new_path, classes) if self.layers else new_path
        found = normalise_path(walked), new_kind
        return None if found == (path, kind) else found

    def _layered(self, path: str, classes: Named[str, str]) -> str:
        parts, found, at, kind = path.split("."), list[str](), 0, _TOP
        while at < len(parts):
            table = self.layers.get(kind, {})
            rest = ".".join(parts[at:]) + "."
            own = max((key for key in table if rest.startswith(key + ".")), key=len, default=None)
            if own is None:
                found.append(parts[at])
                at += 1
            else:
                self.used.add(_layer(kind, own))
                found += [part for part in table[own].split(".") if part]
                at += own.count(".") + 1
            kind = classes.get(".".join(parts[:at]), "")
        return ".".join(found)


_BEFORE = re.compile(r"\.(?:forward|backward)(?:\.\d+)?(?=\.|$)")


def is_mapping(raw: Any) -> bool:
    """Whether this is one of msprobe's files, and not rules of ours."""
    if isinstance(raw, list):
        return bool(raw) and all(isinstance(r, dict) and "ms_api" in r for r in raw)
    return isinstance(raw, dict) and bool(raw) and "format" not in raw and all(
        isinstance(value, str | dict) for value in raw.values()
    )  # fmt: skip


def parse(raw: Any, origin: str) -> Mapping:
    """One of msprobe's mapping files.

    Raises:
        ConfigError: it is of none of the four kinds; the message names the entry.
    """
    if isinstance(raw, list):
        return Mapping(functions=tuple(_function(item, origin) for item in raw))
    for key, value in raw.items():
        inner = [*value, *value.values()] if isinstance(value, dict) else [value]
        if not all(isinstance(text, str) for text in (key, *inner)):
            raise ConfigError(f"{origin}: {key!r}: names are texts, found {value!r:.60}")
    if any(isinstance(value, dict) for value in raw.values()):
        flat = next((key for key, value in raw.items() if not isinstance(value, dict)), None)
        if flat is not None:
            raise ConfigError(
                f"{origin}: {flat!r}: a layer mapping has {{child: child}} below every class"
            )
        layers = {key: {k: v.partition("(")[0] for k, v in v.items()} for key, v in raw.items()}
        if _OLD_TOP in layers:
            layers[_TOP] = layers.pop(_OLD_TOP)
        return Mapping(layers=layers)
    known = {key: value for key, value in raw.items() if _NONE not in (key, value)}
    records = {k: v for k, v in known.items() if _RECORD.search(k) and not _CALL.search(k)}
    calls = {k: v for k, v in known.items() if _CALL.search(k)}
    modules = {_bare(k): _bare(v) for k, v in known.items() if k not in records and k not in calls}
    return Mapping(records, calls, modules)


def _layer(kind: str, child: str) -> str:
    """What an entry of a layer mapping is told by."""
    return f"{kind}: {child}"


def _bare(name: str) -> str:
    """A cell's name without the word before it."""
    return re.sub(r"^(?:Cell|Module)\.", "", name)


def _function(item: dict[str, Any], origin: str) -> Function:
    target, benchmark = item.get("ms_api"), item.get("pt_api")
    if not isinstance(target, str) or not isinstance(benchmark, str):
        raise ConfigError(f"{origin}: ms_api and pt_api are names, found {item!r:.80}")
    indices = {}
    for slot, name in _SLOTS.items():
        lists = item.get(f"ms_{name}") or [], item.get(f"pt_{name}") or []
        if not all(isinstance(each, list) for each in lists) or len(lists[0]) != len(lists[1]):
            raise ConfigError(
                f"{origin}: {target}: ms_{name} and pt_{name} are lists of one length, found "
                f"{lists[0]!r:.40} and {lists[1]!r:.40}"
            )
        indices[slot] = {str(t): str(b) for t, b in zip(*lists, strict=True)}
    if not any(indices.values()):
        raise ConfigError(f"{origin}: {target}: no argument or output is mapped")
    return Function(target, benchmark, indices)
