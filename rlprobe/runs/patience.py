"""Machines that are busy: a Ray that did not come up is started again, after a longer wait.

Ray gives its own processes 30 seconds (``ray/_private/node.py``, Ray 2.60), whatever else the
machine does, and ends with one of a few sentences. Only a run that has not begun its first stage is
started again: what fails later is a failure.
"""

from __future__ import annotations

import re

#: Seconds before each further attempt.
WAITS = (30.0, 120.0)
#: What Ray says of itself when its processes did not come up in time.
_SAID = re.compile(
    r"The current node timed out during startup"
    r"|Failed to (?:start|connect to) GCS\b"
    r"|Timed out after \d+ seconds while waiting for node to startup"
    r"|Failed to start a dashboard"
    r"|Can't find a `node_ip_address\.json` file"
    r"|Worker \S+ failed to register (?:itself )?(?:in time|with the raylet)"
)


def ray_was_late(log: str) -> str | None:
    """The sentence in which Ray says that it did not come up; None where it says nothing of it."""
    found = _SAID.search(log)
    return None if found is None else found.group()


def longer(attempt: int) -> dict[str, str]:
    """Ray's own limits for a further attempt, counted from 1: as many times as long."""
    factor = 1 + 2 * attempt
    return {
        "RAY_gcs_server_request_timeout_seconds": str(60 * factor),
        "RAY_worker_register_timeout_seconds": str(60 * factor),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(60 * factor),
    }
