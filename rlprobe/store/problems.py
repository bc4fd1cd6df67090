"""What verify says: something that is not as it should be, whose it is, and each way back."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe.store.manifest import Manifest

#: What is wrong with what; repair goes by it.
MANIFEST, COPY, GONE, OBJECT, TREE, EXTRA, STRAY, RECORD, ASSET = (
    "manifest", "copy", "gone", "object", "tree", "extra", "stray", "record", "asset",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    kind: str
    path: Path
    what: str
    #: Runs that it belongs to, with the stages: ``3f9a2c… (target): actor_update``.
    of: tuple[str, ...] = ()
    #: How to mend it, as commands in backticks.
    way: str = ""

    def __str__(self) -> str:
        whose = f"\n  belongs to {'; '.join(self.of)}" if self.of else ""
        way = f"\n  way back: {self.way}" if self.way else ""
        return f"{self.path}: {self.what}{whose}{way}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "path": str(self.path),
            "what": self.what,
            "of": list(self.of),
            "way": self.way,
        }


@dataclass(frozen=True)
class Ways:
    """Words for the ways back of one store's problems."""

    store: Path

    def repair(self) -> str:
        return f"`rlprobe store verify --repair --store {shlex.quote(str(self.store))}`"

    def elsewhere(self, runs: Mapping[str, str]) -> str:
        """Where no copy is in the store.

        Args:
            runs: keys and roles of the runs that lack it.
        """
        store = shlex.quote(str(self.store))
        ways = [
            f"`rlprobe store verify --repair --store {store} --from FILE`, FILE being a bundle or "
            "another store that has it"
        ]
        for key, role in runs.items():
            ways.append(
                f"`rlprobe run --force --config CONFIG --role {role} --store {store}` with the "
                f"alignment's file makes run {key[:12]} again"
            )
        for key in runs:
            ways.append(f"`rlprobe store rm --force --store {store} {key[:16]}` drops it")
        return "no other copy is in this store: " + "; or ".join(ways)

    def remove(self, path: Path) -> str:
        return f"`rm -r {shlex.quote(str(path))}`"


def stage_of(path: str) -> str:
    """The stage that a run's file is of; its own name where it is of none."""
    parts = path.split("/")
    if len(parts) < 2:
        return path
    if parts[0] in ("logical", "records", "routing", "token_sketches"):
        return parts[1].removesuffix(".parquet")
    if parts[0] == "dump" and len(parts) > 2:
        return f"key data {parts[2]}" if parts[1] == "data" else parts[1]
    return parts[0] if parts[0] != "dump" else parts[1]


def whose(uses: Iterable[tuple[str, str]], manifests: Mapping[str, Manifest]) -> tuple[str, ...]:
    """Runs and stages that use an object.

    Args:
        uses: keys of runs, and paths in them.
        manifests: by key.
    """
    found: dict[str, set[str]] = {}
    for key, path in uses:
        found.setdefault(key, set()).add(stage_of(path))
    return tuple(
        f"run {key[:12]} ({manifests[key].role}): {', '.join(sorted(stages))}"
        for key, stages in found.items()
    )
