"""What a process leaves besides the dump: ``{side}/parts/``.

Several processes of one run write here; every file name carries role and rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlprobe.capture.files import append_line, append_lines, write_json
from rlprobe.capture.session import Session


class Parts:
    """The parts of one role on one rank."""

    def __init__(self, session: Session, role: str, rank: int) -> None:
        self.root = Path(session.side) / "parts"
        self._stem = f"{role}-rank{rank}"

    def once(self, kind: str, value: dict[str, Any]) -> None:
        """``{kind}/{role}-rank{R}.json``: layout and environment."""
        write_json(self.root / kind / f"{self._stem}.json", value, indent=1)

    def line(self, kind: str, value: dict[str, Any]) -> None:
        """A line of ``{kind}/{role}-rank{R}.jsonl``: captured and samples."""
        append_line(self.root / kind / f"{self._stem}.jsonl", value)

    def lines(self, kind: str, values: list[dict[str, Any]]) -> None:
        """Lines of ``{kind}/{role}-rank{R}.jsonl``: weights."""
        append_lines(self.root / kind / f"{self._stem}.jsonl", values)

    def first_step(self, number: int) -> None:
        """The trainer's number of step 0; every process knows the same one."""
        path = self.root / "first_step.json"
        if not path.exists():
            write_json(path, {"first_step": number})
