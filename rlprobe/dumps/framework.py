"""Which framework a dump was made in, by what stands before and after its records."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: How the note of two frameworks begins (:mod:`rlprobe.compare.planner`).
NOTE = "the benchmark was dumped in "
#: What is read of either end of a file: a header is a few lines.
_ENDS = 1 << 16
#: msprobe's words, and what people call them.
_NAMES = {b"pytorch": "PyTorch", b"mindspore": "MindSpore"}
#: A record has no such text under such a key: its values are objects.
_SAID = re.compile(rb'"framework"\s*:\s*"(pytorch|mindspore)"')
#: How modules are called in either, where an older dump does not say.
_MODULE = re.compile(rb'"(Module|Cell)\.')
_OF_MODULES = {b"Module": "PyTorch", b"Cell": "MindSpore"}


def of(path: Path) -> str | None:
    """The framework of a dump.json or debug.json, as people call it; None where nothing says.

    Whatever is wrong with the file is told by whoever reads its records.
    """
    try:
        with path.open("rb") as file:
            ends = file.read(_ENDS)
            file.seek(max(file.tell(), os.fstat(file.fileno()).st_size - _ENDS))
            ends += file.read(_ENDS)
    except OSError:
        return None
    if (said := _SAID.search(ends)) is not None:
        return _NAMES[said[1]]
    module = _MODULE.search(ends)
    return None if module is None else _OF_MODULES[module[1]]
