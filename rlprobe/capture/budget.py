"""A disk budget: capture stops cleanly when it is spent, and what is there stays complete."""

from __future__ import annotations

from pathlib import Path

from rlprobe.capture.session import Session
from rlprobe.errors import RunError

_MIB = 1 << 20


class Budget:
    """Bytes this process may still write for the role it captures.

    A stage that has begun is always finished; the next one is refused. The budget counts per
    process: a run of R ranks may write R times as much.
    """

    def __init__(self, session: Session) -> None:
        limit = session.capture.budget_mib
        self._limit = None if limit is None else limit * _MIB
        self._spent = 0
        self._directories: dict[Path, int] = {}
        self._begun: tuple[str, int] | None = None

    def add(self, size: int) -> None:
        """Bytes written to a file that is written once."""
        self._spent += size

    def spend(self, directory: Path) -> None:
        """Count a stage directory as it is now (it grows with every entry of the stage)."""
        if self._limit is None:
            return
        size = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        self._spent += size - self._directories.get(directory, 0)
        self._directories[directory] = size

    def require(self, stage: str, step: int) -> None:
        """Refuse to begin a stage when nothing is left; one entered again goes on to its end.

        Raises:
            RunError: what was allowed, what is spent, and where the capture ends.
        """
        if self._begun == (stage, step):
            return  # generation enters its stage once a request: half of them would be no stage
        if self._limit is not None and self._spent >= self._limit:
            raise RunError(
                f"the capture budget of {self._limit // _MIB} MiB is spent "
                f"({self._spent / _MIB:.1f} MiB written) before step {step}, {stage}; everything "
                "captured until here is complete. Raise capture.budget_mib, or capture fewer "
                "stages, steps or ranks"
            )
        self._begun = (stage, step)
