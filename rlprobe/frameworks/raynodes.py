"""What a Ray cluster says of its nodes. Runs in the framework's image, beside the head.

    RAY_ADDRESS=10.0.0.1:6380 python -m rlprobe.frameworks.raynodes 2 --timeout 300
    RAY_ADDRESS=10.0.0.1:6380 python -m rlprobe.frameworks.raynodes --lost --timeout 30

The first waits until all have joined; the second waits until one is gone, and prints the addresses
of those that are, one a line after :data:`LOST`.
"""

from __future__ import annotations

import argparse
import sys
import time

_INTERVAL_S = 0.5
#: Begins the line of a node that is gone.
LOST = "lost "


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


def lost(timeout_s: float) -> list[str]:
    """Addresses of nodes that had joined the cluster that RAY_ADDRESS names, and are gone.

    Waits for the first at most so long: Ray gives a node up when some of its answers are missing.
    """
    import ray

    ray.init(log_to_driver=False, logging_level="warning")
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            nodes = ray.nodes()
            alive = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
            gone = {node["NodeManagerAddress"] for node in nodes} - alive
            if gone or time.monotonic() > deadline:
                return sorted(gone)
            time.sleep(_INTERVAL_S)
    finally:
        ray.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rlprobe.frameworks.raynodes")
    parser.add_argument("count", type=int, nargs="?")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--lost", action="store_true")
    given = parser.parse_args()
    if given.timeout is None or (given.count is None) != given.lost:
        parser.error("give --timeout and COUNT, or --timeout and --lost")
    if given.lost:
        print("".join(f"{LOST}{address}\n" for address in lost(given.timeout)), end="")
        return 0
    joined = wait(given.count, given.timeout)
    print(f"{len(joined)} of {given.count} Ray nodes joined: {', '.join(joined)}")
    return 0 if len(joined) >= given.count else 1


if __name__ == "__main__":
    sys.exit(main())
