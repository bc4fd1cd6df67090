"""``configurations.json``: the framework's resolved configuration, beside the dumps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe.capture.files import write_json
from rlprobe.capture.session import Session


def write(session: Session, configuration: Mapping[str, Any]) -> Path:
    """Write the configuration to ``{dump}/configurations.json``; returns the file.

    Values that JSON lacks (paths, enumerations) are written as text.
    """
    path = Path(session.dump) / "configurations.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, json.loads(json.dumps(configuration, default=str, sort_keys=True)))
    return path
