"""Wait until a Ray cluster has all its nodes. Runs in the framework's image, beside the head.

RAY_ADDRESS=10.0.0.1:6380 python -m rlprobe.frameworks.raynodes 2 --timeout 300
"""

from __future__ import annotations

import argparse
import sys
import time

_INTERVAL_S = 0.5


def wait(count: int, timeout_s: float) -> list[str]:
    """Addresses of the nodes that joined, after at most ``timeout_s``; may be fewer than ``count``.

    Attaches to the cluster that RAY_ADDRESS names.
    """
    import ray

    ray.init(log_to_driver=False, logging_level="warning")
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            joined = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
            if len(joined) >= count or time.monotonic() > deadline:
                return sorted(joined)
            time.sleep(_INTERVAL_S)
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlprobe.frameworks.raynodes")
    parser.add_argument("count", type=int)
    parser.add_argument("--timeout", type=float, required=True)
    given = parser.parse_args()
    joined = wait(given.count, given.timeout)
    print(f"{len(joined)} of {given.count} Ray nodes joined: {', '.join(joined)}")
    return 0 if len(joined) >= given.count else 1


if __name__ == "__main__":
    sys.exit(main())
