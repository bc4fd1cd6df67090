"""The shell script a run executes inside its image; anyone can run it again by hand."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence

_HEADER = (
    "#!/bin/bash\n# One run of rlprobe, as it was started. Run it again: bash {path}\nset -eu\n"
)


def render(
    path: str,
    environment: Mapping[str, str],
    commands: Sequence[Sequence[str]],
    *,
    inside_image: bool,
) -> str:
    """The script's text: exports, preparing commands, and the framework's command last.

    Outside an image ``python`` means the interpreter that runs rlprobe.
    """
    lines = [_HEADER.format(path=shlex.quote(path))]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    for index, command in enumerate(commands):
        words = list(command)
        if words[0] == "python" and not inside_image:
            words[0] = sys.executable
        text = " \\\n  ".join(shlex.quote(word) for word in words)
        lines.append(f"exec {text}" if index == len(commands) - 1 else text)
    return "\n".join(lines) + "\n"
