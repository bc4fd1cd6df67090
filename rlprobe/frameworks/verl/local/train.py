"""``python -m verl.trainer.main_ppo`` without Ray, with the same overrides, once.

    python -m rlprobe.frameworks.verl.local.train OVERRIDE…

What :mod:`.inprocess` does for each request of a self-test, for a single run.
"""

from __future__ import annotations

import sys

from rlprobe.errors import RlprobeError
from rlprobe.frameworks import verl
from rlprobe.frameworks.verl.local import inprocess


def main(overrides: list[str]) -> int:
    """The exit status of a run, its error told on stderr as rlprobe's commands do."""
    verl.activate()
    try:
        inprocess.preload()
        inprocess.train(overrides)
    except RlprobeError as error:
        sys.stderr.write(f"rlprobe: error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
