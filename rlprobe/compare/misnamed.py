"""Directories that are called nearly as msprobe calls a step's or a process's, and are not read."""

from __future__ import annotations

import re
from pathlib import Path

#: Names that mean a step or a process to a reader, and entries of a directory that are looked at.
_NEARLY = re.compile(r"^(step|rank|proc)[-_. ]?(\d{1,9})$", re.IGNORECASE)
_LOOKED_AT = 100


def below(path: Path) -> list[tuple[str, str]]:
    """Directories at or right below a place that are called nearly as msprobe does, and as it does.

    They are nobody's step or process, and what they hold is not read.
    """
    try:
        below = [child for child in sorted(path.iterdir()) if child.is_dir()][:_LOOKED_AT]
        inside = [inner for child in below for inner in sorted(child.iterdir())[:_LOOKED_AT]]
    except OSError:
        return []
    found: dict[str, str] = {}
    for name in [child.name for child in (*below, *inside)]:
        match = _NEARLY.match(name)
        if match is not None and name != (meant := f"{match[1].lower()}{int(match[2])}"):
            found[name] = meant
    return list(found.items())
