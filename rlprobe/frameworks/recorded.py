"""Which of our recorded rollouts a replay's step takes, the same for every framework."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rlprobe.capture.session import ReplayOptions
from rlprobe.rollouts import Rollouts, hdf5
from rlprobe.rollouts.order import ReplayOrder


def load_step(options: ReplayOptions, step: int) -> tuple[Rollouts, str] | None:
    """The rollouts for ``step`` and the file that they lie in; None where there are no step files.

    Looked for in the directory of the options, then in its ``rollouts/``.

    Raises:
        ReplayError: there are step files, but not the step that is wanted.
    """
    root = Path(options.path)
    for directory in (root, root / "rollouts"):
        available = hdf5.steps(directory) if directory.is_dir() else {}
        if available:
            path = available[order(options, available).recorded(step)]
            return hdf5.read(path), str(path)
    return None


def order(options: ReplayOptions, available: Iterable[int]) -> ReplayOrder:
    """The order in which the options want these steps."""
    return ReplayOrder(available, options.seed, options.step_start, options.step_end)
