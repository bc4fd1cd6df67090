"""Directories of processes that hold no dump: a run that ended early, or a copy that lost files."""

from __future__ import annotations

from pathlib import Path

from rlprobe.dumps import records


def below(root: Path) -> list[str]:
    """Rank and proc directories of a stage or a step without dump.json and debug.json.

    Returns:
        their paths below ``root``, with what they hold instead: ``step1/rank1 (stack.json)``.

    Raises:
        DumpError: a directory cannot be listed.
    """
    steps = records.step_directories(root) or [(0, root)]
    ranks = [rank for step, path in steps for rank in records.rank_directories(path, step)]
    return [
        f"{rank.path.relative_to(root).as_posix()} ({_held(rank.path)})"
        for rank in ranks
        if not records.dumped(rank.path)
    ]


def _held(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "") if names else "empty"
