"""Notes one command of a traced script: its words, directory and environment, as a JSON line.

    python -I -S note.py python -m verl.trainer.main_ppo …

Stands in the command's place, so that it sees what the command would have seen. A shell in it, as
in ``docker exec NAME bash -c "…"``, is traced in its turn. Standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

#: Variables of the tracing itself.
OWN = "RLPROBE_TRACE_"
_DEEPEST = 4


def main(argv: list[str]) -> int:
    line = json.dumps(
        {
            "argv": argv,
            "cwd": os.getcwd(),  # noqa: PTH109
            "env": {k: v for k, v in os.environ.items() if not k.startswith(OWN)},
        }
    )
    with open(os.environ[f"{OWN}OUT"], "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(line + "\n")
    depth = int(os.environ.get(f"{OWN}DEPTH", "0"))
    inner = shell_in(argv)
    if inner is not None and depth < _DEEPEST:
        environment = {**os.environ, f"{OWN}DEPTH": str(depth + 1)}
        subprocess.run([os.environ[f"{OWN}BASH"], *inner], env=environment, check=False)
    return 0


def shell_in(argv: list[str]) -> list[str] | None:
    """The arguments of a shell that a command starts with a script or a text; None: no shell."""
    for index, word in enumerate(argv):
        if os.path.basename(word) not in ("bash", "sh"):  # noqa: PTH119
            continue
        rest = argv[index + 1 :]
        while rest and rest[0].startswith("-"):
            option = rest.pop(0)
            if not option.startswith("--") and "c" in option:
                return ["-c", *rest] if rest else None
        return rest or None
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
