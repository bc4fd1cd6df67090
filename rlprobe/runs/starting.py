"""How long a run takes until its first stage, as the last one of its kind took on this store.

An estimate for who waits, and nothing else: where it cannot be read, there is none.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlprobe.documents import jsonfile
from rlprobe.documents.limits import DocumentError
from rlprobe.files import replace_text
from rlprobe.spec import RunSpec

_FILE = Path("locks", "starting.json")
#: Shorter than this nobody asks.
_SHORT_S = 5.0


def expected(store: Path, spec: RunSpec) -> float | None:
    """Seconds until a run like this one begins its first stage; None where that is not known."""
    found = _known(store).get(_kind(spec))
    return found if found is not None and found >= _SHORT_S else None


def remember(store: Path, spec: RunSpec, seconds: float) -> None:
    """Keep how long a run took to start."""
    known = _known(store) | {_kind(spec): round(seconds, 1)}
    replace_text(store / _FILE, json.dumps(known, indent=1, sort_keys=True))


def _kind(spec: RunSpec) -> str:
    """What decides how long starting takes: the framework, where it runs and what starts it."""
    runtime = spec.container.runtime
    return " ".join([spec.framework, spec.device, runtime, "ray" if spec.ray else "no ray"])


def _known(store: Path) -> dict[str, float]:
    try:
        said = jsonfile.mapping(jsonfile.load(store / _FILE))
    except DocumentError:
        return {}
    return {kind: float(s) for kind, s in said.items() if isinstance(s, int | float) and s >= 0}
