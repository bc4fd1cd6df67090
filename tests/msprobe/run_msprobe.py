"""Run ``msprobe compare`` on several pairs in one process: its imports cost seconds.

usage: run_msprobe.py PAIRS.json   with [[target dump.json, golden dump.json, output directory], …]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from msprobe.pytorch.compare.pt_compare import pt_compare

if __name__ == "__main__":
    for target, golden, out in json.loads(Path(sys.argv[1]).read_text()):
        pt_compare({"npu_path": target, "bench_path": golden, "is_print_compare_log": False}, out)
