"""``configurations.json``: the framework's resolved configuration, beside the dumps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlprobe import redaction
from rlprobe.capture.files import write_json
from rlprobe.capture.session import Session


def write(session: Session, configuration: Mapping[str, Any]) -> Path:
    """Write the configuration to ``{dump}/configurations.json``; returns the file.

    Values that JSON lacks (paths, enumerations) are written as text. Secrets are left out, also
    those of this process's environment, which the framework may have resolved into it.
    """
    path = Path(session.dump) / "configurations.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(configuration, default=str, sort_keys=True))
    write_json(path, redaction.value(plain, secrets=redaction.known(os.environ)))
    return path
