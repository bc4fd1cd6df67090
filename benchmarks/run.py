"""Measure one thing against its peer in the same run: ``python benchmarks/run.py NAME --json F``.

The JSON holds name, ours_s, peer_s, ratio (peer_s / ours_s), ours_mib, peer_mib and command; what
concerns a peer is null where there is none. Seconds are of whole processes, imports included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Name -> module with ``BENCHMARKS[name](settings) -> dict``, or with ``main(argv)``.
MODULES: dict[str, str] = {
    "compare-store": "benchmarks.compare_bench",
    "compare-sketches": "benchmarks.compare_bench",
    "compare-json": "benchmarks.compare_bench",
    "compare-tensors": "benchmarks.compare_bench",
    "compare-equal": "benchmarks.compare_bench",
    "compare-64ranks": "benchmarks.compare_bench",
    "report-64ranks": "benchmarks.compare_bench",
    "capture": "benchmarks.capture",
    "align": "benchmarks.align",
    "report": "benchmarks.align",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(MODULES), metavar="NAME", help=", ".join(MODULES))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--directory", type=Path, help="where generated data is kept for next time")
    parser.add_argument("--runs", type=int, default=3, help="runs of ours; the quickest counts")
    parser.add_argument("--size", type=int, help="a smaller run: entries, tensors or ranks")
    parser.add_argument("--no-peer", action="store_true", help="don't run the peer")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(MODULES[args.name])
    result: dict[str, Any] = module.BENCHMARKS[args.name](
        _settings(args) if hasattr(module, "Settings") else args
    )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 0


def _settings(args: argparse.Namespace) -> Any:
    from benchmarks.compare_bench import Settings

    return Settings(args.directory, args.runs, not args.no_peer, args.size)


if __name__ == "__main__":
    sys.exit(main())
