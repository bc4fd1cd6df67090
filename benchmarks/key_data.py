"""What key data cost on the default verl run, in milliseconds a step.

The benchmark run of config/config.yaml, without Ray, every step captured as an alignment captures
it; with key data and without, in turn. A run's step time is the median of its trainer's own
(``timing_s/step``), the first step left out; a mode's is the smallest of its runs'.

    python benchmarks/key_data.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlprobe.config import load  # noqa: E402
from rlprobe.runs.launch import launch  # noqa: E402
from rlprobe.runs.plan import plan  # noqa: E402
from rlprobe.selftest.forkservers import ForkServers  # noqa: E402


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Run both modes ``rounds`` times in turn, ``steps`` steps each."""
    found: dict[bool, list[float]] = {False: [], True: []}
    sizes: dict[bool, float] = {}
    with tempfile.TemporaryDirectory(prefix="rlprobe-bench-", dir="/tmp") as scratch:
        place = Path(scratch)
        with ForkServers(place / "logs") as servers:
            for turn in range(rounds):
                for on in (False, True) if turn % 2 == 0 else (True, False):
                    run = _run(place / f"{turn}-{on}", steps, on, servers)
                    found[on].append(_step_ms(run))
                    data = run / "dump/data"
                    written = [path for path in data.rglob("*") if path.is_file()]
                    sizes[on] = sum(path.stat().st_size for path in written) / steps / 2**20
    without, with_key_data = (min(found[on]) for on in (False, True))
    return {
        "step_ms": {"without": without, "with": with_key_data},
        "key_data_ms_per_step": with_key_data - without,
        "step_ratio": with_key_data / without,
        "disk_mib_per_step": sizes[True],
    }


def _run(place: Path, steps: int, key_data: bool, servers: ForkServers) -> Path:
    place.mkdir()
    raw = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    raw |= {"store": str(place / "store"), "results": str(place / "results")}
    raw["steps"] = {"total": steps, "start": 0, "end": steps - 1}
    raw["capture"]["key_data"] = key_data
    (place / "config.yaml").write_text(yaml.safe_dump(raw))
    spec = plan(load(place / "config.yaml"), {})["benchmark"]
    return launch(spec, place / "store", start=servers).parent


def _step_ms(run: Path) -> float:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["metrics"]["timing_s/step"] for line in lines]
    return statistics.median(seconds[1:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    print(json.dumps(measure(args.rounds, args.steps), indent=1))


if __name__ == "__main__":
    main()
