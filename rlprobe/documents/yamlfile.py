"""Reads YAML within limits: plain data, no key twice, aliases that cannot multiply."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import yaml

from rlprobe.documents.limits import (
    MAX_DEPTH,
    MAX_DIGITS,
    DocumentError,
    check_characters,
    decoded,
    read_bytes,
)

#: Nobody writes more by hand, and the parser, in Python, takes seconds for it.
MAX_BYTES = 1 << 20
#: Values, keys and their characters after aliases are put in: nested aliases double at every level.
MAX_NODES = 20_000
MAX_CHARACTERS = 4 << 20

_TAG = "tag:yaml.org,2002:"
_YAML_1_1 = frozenset(_TAG + kind for kind in ("int", "float", "timestamp", "value"))
_KINDS = {
    **{_TAG + name: yaml.ScalarNode for name in ("str", "int", "float", "bool", "null", "merge")},
    _TAG + "seq": yaml.SequenceNode,
    _TAG + "map": yaml.MappingNode,
}


def load(path: str | os.PathLike[str]) -> Any:
    """The value in a YAML file.

    Raises:
        DocumentError: unreadable, too large, or :func:`parse` refuses it.
    """
    return parse(decoded(read_bytes(path, MAX_BYTES)))


def parse(text: str) -> Any:
    """The value that a YAML text stands for: text, numbers, truth values, null, lists, mappings.

    Numbers are YAML 1.2's: 12:30:00 is text, 010 is ten, 2026-01-01 is text. Keys are text.

    Raises:
        DocumentError: not YAML, another tag, a key given twice, or beyond a limit; with the place.
    """
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.reader.ReaderError as error:
        raise DocumentError(
            f"not YAML: character {error.position + 1} is U+{error.character:04X}, which may not "
            "stand in it"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise DocumentError(f"{_place(mark)}not YAML: {error.problem or error.context}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML converts escapes and directives unchecked: "\UFFFFFFFF", %YAML 99…
        mark = None if loader is None else loader.get_mark()
        raise DocumentError(
            f"{_place(mark)}not YAML: an escape or a directive before it stands for nothing"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


@dataclass(frozen=True)
class _Extent:
    """How much a node is once aliases are put in."""

    nodes: int
    characters: int
    depth: int


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits and YAML 1.2's plain numbers."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._extents: dict[yaml.Node, _Extent] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._level += 1
        try:
            # refused where it opens: the parser goes one call deeper for each
            if self._level > MAX_DEPTH:
                raise _error(f"nests deeper than {MAX_DEPTH} levels", event.start_mark)
            node = super().compose_node(parent, index)
        finally:
            self._level -= 1
        if isinstance(event, yaml.AliasEvent):
            if node not in self._extents:
                raise _error(f"the alias *{event.anchor} stands in itself", event.start_mark)
        elif node is not None:
            self._extents[node] = self._measured(node)
            if len(self._extents) > MAX_NODES:
                raise _error(f"holds more than {MAX_NODES} values", event.start_mark)
        return node

    def _measured(self, node: yaml.Node) -> _Extent:
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(self, node)
            return _Extent(1, len(node.value), 1)
        _check_tag(node)
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        extents = [self._extents[child] for child in children]
        extent = _Extent(
            1 + sum(e.nodes for e in extents),
            sum(e.characters for e in extents),
            1 + max((e.depth for e in extents), default=0),
        )
        if extent.nodes > MAX_NODES or extent.characters > MAX_CHARACTERS:
            raise _error(
                f"holds {extent.nodes} values of {extent.characters} characters, aliases put in; "
                f"accepted: {MAX_NODES} of {MAX_CHARACTERS}",
                node.start_mark,
            )
        if extent.depth > MAX_DEPTH:
            raise _error(f"nests deeper than {MAX_DEPTH} levels", node.start_mark)
        return extent

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _error(f"found the key {key!r:.60}; keys are text", key_node.start_mark)
            if key in seen:
                raise _error(f"the key {key!r:.60} was given before", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)


_NAMES = {yaml.ScalarNode: "a value", yaml.SequenceNode: "a list", yaml.MappingNode: "a mapping"}


def _check_tag(node: yaml.Node) -> None:
    kind = _KINDS.get(node.tag)
    if kind is None or not isinstance(node, kind):
        name = node.tag.replace(_TAG, "!!")
        raise _error(
            f"the tag {name:.60} is not accepted for {_NAMES[type(node)]}", node.start_mark
        )


def _check_scalar(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> None:
    _check_tag(node)
    try:
        check_characters(node.value)
    except DocumentError as error:
        raise _error(str(error), node.start_mark) from error
    # the tag it would have, were none written
    plain = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    wanted = {node.tag, _TAG + "int"} if node.tag == _TAG + "float" else {node.tag}
    if node.tag != _TAG + "str" and plain not in wanted:
        name = node.tag.replace(_TAG, "!!")
        raise _error(f"{node.value!r:.60} is no {name}", node.start_mark)
    if plain == _TAG + "int" and node.tag != _TAG + "str" and len(node.value) > MAX_DIGITS:
        raise _error(
            f"a whole number has {len(node.value)} digits; accepted: {MAX_DIGITS}",
            node.start_mark,
        )


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _YAML_1_1]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor(_TAG + "int", _decimal)
_Loader.add_implicit_resolver(_TAG + "int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+0123456789."),
)
