"""``python -m rlprobe``."""

from __future__ import annotations

import sys

from rlprobe.cli import main

if __name__ == "__main__":
    sys.exit(main())
