"""Matching rules: which differently named records are the same; YAML, extendable by the user."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlprobe.compare.match import mapping
from rlprobe.compare.match.mapping import Mapping
from rlprobe.compare.match.recompute import RECOMPUTE
from rlprobe.documents.limits import DocumentError, decoded, read_bytes
from rlprobe.errors import ConfigError
from rlprobe.logical import fused, names

FORMAT = 1
#: Rules built into the matcher, by the names summary.json counts them under.
WRAPPERS = "wrappers"
CLASS = "class"
CALL_COUNTER = "call_counter"
#: Megatron's spelling of the Hugging Face model (:mod:`rlprobe.logical.names`).
MEGATRON = "megatron"
#: Aligned, but the call that stayed alone could as well have been the pair.
AMBIGUOUS = "ambiguous_call"
COMMON_PREFIX = "common_prefix"
#: By one of msprobe's mapping files.
MAPPED = "msprobe_mapping"
CHUNKS = "megatron_chunks"
#: An argument given by position on one side and by name on the other.
KEYWORD = "keyword"
BUILT_IN = (
    *(WRAPPERS, CLASS, CALL_COUNTER, AMBIGUOUS, COMMON_PREFIX, MAPPED, RECOMPUTE, CHUNKS),
    KEYWORD,
)

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Rename:
    """Regular expressions rewriting module paths."""

    name: str
    replace: tuple[tuple[re.Pattern[str], str], ...]

    def apply(self, path: str) -> str:
        for pattern, replacement in self.replace:
            path = pattern.sub(replacement, path)
        return path


@dataclass(frozen=True)
class Fuse:
    """A module that is several on the other side."""

    name: str
    whole: str
    parts: tuple[str, ...]
    #: Classes of the whole in which the parts lie one behind the other.
    elementwise: re.Pattern[str]


@dataclass(frozen=True)
class Function:
    """Functions that are each other's counterparts, and what of them means the same."""

    name: str
    names: tuple[str, ...]
    slots: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Rules:
    """All rules, in order of precedence."""

    renames: tuple[Rename, ...] = ()
    fuses: tuple[Fuse, ...] = ()
    functions: tuple[Function, ...] = ()
    #: What the target's names are called on the benchmark, of one of msprobe's files.
    mapping: Mapping | None = None
    #: Names of the user's own.
    own: tuple[str, ...] = ()
    #: Names of renames that rewrote any path, of all processes.
    applied: set[str] = field(default_factory=set, repr=False, compare=False)

    def unused(self, counted: Iterable[str]) -> list[str]:
        """What of the user's file met nothing: names of rules, or what a mapping begins with.

        Args:
            counted: names of rules that joined records.
        """
        used = {*counted, *self.applied}
        idle = [name for name in self.own if name not in used]
        if self.mapping is not None:
            idle += [entry for entry in self.mapping.entries if entry not in self.mapping.used]
        return idle


def load(extra: Path | None = None) -> Rules:
    """The packaged rules, and a user's before them, or one of msprobe's mapping files.

    Raises:
        ConfigError: a file is not in the format; the message names the rule and what is accepted.
    """
    from importlib import resources

    packaged = resources.files(__package__).joinpath("rules.yaml").read_text(encoding="utf-8")
    rules = _with_logical(parse(packaged, "rules.yaml"))
    if extra is None:
        return rules
    try:
        text = decoded(read_bytes(extra, _MAX_BYTES))
    except DocumentError as error:
        raise ConfigError(f"rules file {extra}: {error}") from error
    own = parse(text, str(extra))
    return Rules(
        _merged(own.renames, rules.renames),
        _merged(own.fuses, rules.fuses),
        _merged(own.functions, rules.functions),
        own.mapping,
        (
            *(rule.name for rule in own.renames),
            *(rule.name for rule in own.fuses),
            *(rule.name for rule in own.functions),
        ),
    )


def _with_logical(rules: Rules) -> Rules:
    """The packaged rules with what :mod:`rlprobe.logical` knows, before them."""
    megatron = Rename(
        MEGATRON, tuple((re.compile(pattern), new) for pattern, new in names.rewritten())
    )
    fuses = tuple(
        Fuse(name, whole, fused.PARTS[whole], re.compile(fused.ONE_BEHIND_THE_OTHER[whole]))
        for name, whole in (("qkv", fused.QKV), ("gate_up", fused.GATE_UP))
    )
    return Rules(_merged((megatron,), rules.renames), _merged(fuses, rules.fuses), rules.functions)


def _merged(own: Sequence[Any], packaged: Sequence[Any]) -> tuple[Any, ...]:
    replaced = {rule.name for rule in own}
    return (*own, *(rule for rule in packaged if rule.name not in replaced))


def parse(text: str, origin: str) -> Rules:
    """Rules from YAML text.

    Raises:
        ConfigError: see :func:`load`.
    """
    from rlprobe.documents import yamlfile

    try:
        raw = yamlfile.parse(text)
    except DocumentError as error:
        raise ConfigError(f"rules file {origin}: {error}") from error
    if mapping.is_mapping(raw):
        return Rules(mapping=mapping.parse(raw, origin))
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(
            f"{origin}: format: {FORMAT} was expected at the top, or one of msprobe's data, cell, "
            "layer or api mappings"
        )
    unknown = sorted(set(raw) - {"format", *_SECTIONS}, key=str)
    if unknown:
        raise ConfigError(
            f"{origin}: unknown key {unknown[0]!r}; accepted: format, {', '.join(_SECTIONS)}"
        )
    found: dict[str, tuple[Any, ...]] = {}
    for section, build in _SECTIONS.items():
        items = raw.get(section) or []
        if not isinstance(items, list):
            raise ConfigError(f"{origin}: {section} is a list of rules, found {items!r:.60}")
        found[section] = tuple(_built(build, item, f"{origin}: {section}") for item in items)
    said = [rule.name for rules in found.values() for rule in rules]
    twice = {name for name in said if said.count(name) > 1} | ({*said} & {*BUILT_IN})
    if twice:
        raise ConfigError(f"{origin}: rule name {min(twice)!r} is used twice or built in")
    return Rules(found["rename"], found["fuse"], found["functions"])


def _built(build: Any, item: Any, where: str) -> Any:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ConfigError(f"{where}: every rule is an object with a name, found {item!r:.60}")
    where = f"{where}: {item['name']}"
    try:
        return build(item)
    except re.error as error:
        raise ConfigError(
            f"{where}: {error.pattern!r} is no regular expression: {error}"
        ) from error
    except (KeyError, IndexError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {_ACCEPTED[build]}; found {error}") from error


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ValueError(repr(values)[:60])
    return tuple(values)


def _rename(item: dict[str, Any]) -> Rename:
    pairs = [_texts(pair) for pair in item["replace"]]
    compiled = tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)
    for pattern, replacement in compiled:
        if len(replacement) > 256:
            raise ValueError(replacement[:60])
        groups = [int(number) for number in re.findall(r"\\(?:g<)?(\d+)", replacement)]
        if max(groups, default=0) > pattern.groups:
            raise ValueError(f"{replacement!r}, which names a group that {pattern.pattern!r} lacks")
        pattern.sub(replacement, "")  # raises for an escape or a name that means nothing
    return Rename(item["name"], compiled)


def _fuse(item: dict[str, Any]) -> Fuse:
    parts = _texts(item["parts"])
    if len(parts) < 2 or "." in "".join((item["whole"], *parts)):
        raise ValueError(f"whole {item['whole']!r}, parts {parts!r}")
    return Fuse(item["name"], item["whole"], parts, re.compile(item.get("elementwise", "$^")))


def _function(item: dict[str, Any]) -> Function:
    if not isinstance(item["slots"], dict):
        raise ValueError(repr(item["slots"])[:60])
    slots = {str(slot): _texts(indices) for slot, indices in item["slots"].items()}
    return Function(item["name"], _texts(item["names"]), slots)


_SECTIONS = {"rename": _rename, "fuse": _fuse, "functions": _function}
_ACCEPTED = {
    _rename: "replace is a list of [regular expression, replacement]",
    _fuse: "whole and parts are last components of module paths, at least two parts",
    _function: "names is a list of functions, slots maps input or output to indices",
}
