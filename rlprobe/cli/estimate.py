"""``rlprobe estimate``: the disk that an alignment's runs will need, before anything runs."""

from __future__ import annotations

import argparse
from typing import Any

from rlprobe.cli.common import given_path, write_json

_MIB = 1 << 20


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "estimate",
        help="say how much disk an alignment's runs will need",
        description="Guess, upwards, how much disk and how many files each run of an alignment "
        "will take, from the model's config.json and the capture section. With "
        "capture.budget_mib, also says whether a run will stop before its end.",
    )
    parser.add_argument(
        "--config", type=given_path, required=True, help="the alignment's YAML file"
    )


def run(args: argparse.Namespace) -> int:
    from rlprobe.config import load
    from rlprobe.doctor import size
    from rlprobe.errors import ConfigError

    alignment = load(args.config)
    roles = size.of_roles(alignment)
    if roles is None:
        raise ConfigError(
            f"model.path: {alignment.model.path} holds no config.json, which says how many layers "
            "there are; put the model there, or run this where it is"
        )
    total = sum(roles.values(), size.Size(0, 0))
    for role, found in [*roles.items(), ("in all", total)]:
        print(f"{role:15} {found.bytes / _MIB:12.1f} MiB {found.files:10} files")
    kept = size.of_states(alignment)
    if kept is not None and kept.bytes:
        print(
            f"of the benchmark's, weights and optimizer state for controls.rejoin: "
            f"{kept.bytes / _MIB:.1f} MiB"
        )
    budget = alignment.capture.budget_mib
    stops = []
    if budget is not None:
        worlds = {"target": alignment.target, "repeat_target": alignment.target}
        for role, found in roles.items():
            side = worlds.get(role, alignment.benchmark)
            ranks = len(alignment.capture.ranks) or side.world_size
            # states do not count: the budget is of what is captured
            captured = found.bytes - (kept.bytes if kept is not None and role == "benchmark" else 0)
            if captured / ranks > budget * _MIB:
                stops.append(role)
        text = f"will stop: {', '.join(stops)}" if stops else "no run is expected to reach it"
        print(f"capture.budget_mib {budget} a process: {text}")
    if args.json:
        write_json(
            args.json,
            {
                "runs": {role: {"bytes": s.bytes, "files": s.files} for role, s in roles.items()},
                "bytes": total.bytes,
                "states": 0 if kept is None else kept.bytes,
                "files": total.files,
                "budget_mib": budget,
                "stops": stops,
            },
        )
    return 0
