"""``rlprobe`` and ``python -m rlprobe``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run one command; the exit code. Ctrl-C while modules are read is no error either."""
    try:
        from rlprobe.cli import main as run

        return run()
    except KeyboardInterrupt:
        sys.stderr.write("rlprobe: error: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
