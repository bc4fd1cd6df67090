"""Reads an alignment's YAML file."""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import ValidationError

from rlprobe.config.alignment import Alignment
from rlprobe.config.problems import describe
from rlprobe.documents import yamlfile
from rlprobe.documents.limits import DocumentError
from rlprobe.errors import ConfigError


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping a YAML file holds.

    Raises:
        ConfigError: the file is missing, not YAML, or holds no mapping.
    """
    try:
        raw = yamlfile.load(path)
    except DocumentError as error:
        way = "; give the path of a YAML file" if isinstance(error.__cause__, OSError) else ""
        raise ConfigError(f"{path}: {error}{way}") from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path}: found {type(raw).__name__ if raw is not None else 'an empty file'}; "
            "accepted: a mapping with the keys " + ", ".join(Alignment.model_fields)
        )
    return raw


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
