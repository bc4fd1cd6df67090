"""Where a stage's files lie below a run's dump.

Under the stage's canonical name, or under the framework's own where its users know it by that
(slime's ``old_log_prob``).
"""

from __future__ import annotations

from pathlib import Path

from rlprobe import stages


def of_stage(dump: Path, stage: str) -> Path | None:
    """A stage's directory; None where it has none.

    Args:
        dump: a run's ``dump``.
        stage: canonical name.
    """
    names = [stage, *(alias for alias, name in stages.ALIASES.items() if name == stage)]
    return next((dump / name for name in names if (dump / name).is_dir()), None)


def of_process(dump: Path, stage: str, step: int, rank: int) -> Path:
    """What one process wrote in one step of a stage; may be missing.

    Args:
        dump: a run's ``dump``.
        stage: canonical name.
        step: captured step, from 0.
        rank: the process's.
    """
    directory = of_stage(dump, stage) or dump / stage
    return directory / f"step{step}" / f"rank{rank}"
