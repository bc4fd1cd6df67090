"""Reads an alignment's YAML file."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rlprobe.config.alignment import Alignment
from rlprobe.config.problems import describe
from rlprobe.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_YAML_1_1 = frozenset(_TAG + kind for kind in ("int", "float", "timestamp"))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain numbers, and no key given twice (of which the last would silently win).

    PyYAML reads 12:30:00 as a number in base 60, 010 as eight and 2026-01-01 as a date.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key {key!r}; keys are text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} was given before", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


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


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping a YAML file holds.

    Raises:
        ConfigError: the file is missing, not YAML, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}: cannot be read: {reason}; give the path of a YAML file"
        ) from error
    try:
        raw = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(_place(path, error)) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: found {type(raw).__name__ if raw is not None else 'an empty file'}; "
            "accepted: a mapping with the keys " + ", ".join(Alignment.model_fields)
        )
    return raw


def _place(path: str | os.PathLike[str], error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path}: not YAML: {error}"
    mark = error.problem_mark
    return f"{path}, line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}"


def parse(raw: dict[str, Any], origin: str) -> Alignment:
    """Validate an alignment.

    Args:
        raw: the file's content.
        origin: the file's name, for messages.

    Raises:
        ConfigError: names every problem: key path, what was found, what is accepted.
    """
    try:
        # JSON is the strict form of what YAML can say: lists are lists, text is text.
        return Alignment.model_validate_json(json.dumps(raw, allow_nan=False))
    except ValidationError as error:
        problems = describe(error, Alignment)
    except (TypeError, ValueError) as error:
        problems = [f"a value is neither text, number, truth value, list nor mapping: {error}"]
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ConfigError("\n".join([f"{origin}: {count}", *(f"  {line}" for line in problems)]))


def load(path: str | os.PathLike[str]) -> Alignment:
    """Read and validate an alignment file.

    Raises:
        ConfigError: missing, not YAML, or wrong; the message names every problem.
    """
    return parse(read_yaml(path), str(path))
