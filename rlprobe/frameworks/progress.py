"""Which step and stage a run is in, for the person who watches it.

One JSON line an event in ``side/progress.jsonl``, written by rank 0; ``rlprobe run`` follows it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from rlprobe.capture.session import Session

FILE = "progress.jsonl"


def report(
    session: Session, stage: str, step: int, trainer_step: int, seconds: float | None = None
) -> None:
    """A stage begins (``seconds`` None) or has ended after ``seconds``."""
    side = Path(session.side)
    side.mkdir(parents=True, exist_ok=True)
    event = {
        "time": time.time(),
        "stage": stage,
        "step": step,
        "trainer_step": trainer_step,
        "seconds": seconds,
    }
    with (side / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
