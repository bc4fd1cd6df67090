"""Machines that are busy: a run that did not come up is started again, after a longer wait.

Ray gives its own processes 30 seconds (``ray/_private/node.py``, Ray 2.60), whatever else the
machine does, and ends with one of a few sentences. Only a run that has not begun its first stage is
started again: what fails later is a failure. So is one that lost a port: frameworks look for a
free one, let it go and take it later (``get_free_port`` of verl), and two runs on one node, as
target and repeat are, may have looked at the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
#: What PyTorch, gRPC and Ray say of a port that somebody else has.
_TAKEN = re.compile(r"EADDRINUSE|[Aa]ddress already in use")
#: Seconds until another port is looked for.
_ANOTHER_PORT = 2.0


@dataclass(frozen=True)
class Reason:
    """Why a run that did not come up may do so another time."""

    #: What happened, and the words in the log that say it.
    what: str
    said: str
    #: Seconds before it is started again.
    wait: float


def reason(log: str, attempt: int) -> Reason | None:
    """Why to start a run again; None where nothing in its log says that it would help.

    Args:
        log: what the attempt said.
        attempt: its number, from 0.
    """
    late = _SAID.search(log)
    if late is not None:
        what = "Ray did not come up; the machine may be busy"
        return Reason(what, late.group(), WAITS[attempt])
    taken = _TAKEN.search(log)
    if taken is not None:
        what = "a port that was free has been taken by another process"
        return Reason(what, taken.group(), _ANOTHER_PORT)
    return None


def longer(attempt: int) -> dict[str, str]:
    """Ray's own limits for a further attempt, counted from 1: as many times as long."""
    factor = 1 + 2 * attempt
    return {
        "RAY_gcs_server_request_timeout_seconds": str(60 * factor),
        "RAY_worker_register_timeout_seconds": str(60 * factor),
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(60 * factor),
    }
