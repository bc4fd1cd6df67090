"""A store with runs, an alignment's results and bundles, small enough for a copy each round."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlprobe.cli import main
from rlprobe.documents import seal
from rlprobe.store.alignments import record_alignment
from rlprobe.store.commit import commit
from rlprobe.store.exporting import export
from rlprobe.store.keys import run_key
from rlprobe.store.read import keys
from rlprobe.store.repair import repair
from tests.unit.store.conftest import declare, write_scratch

_SIDES = ("benchmark", "target")
_RELEASED = Path(__file__).parents[1] / "unit" / "formats" / "0.1.0.tar.xz"


@dataclass(frozen=True)
class World:
    """What is copied for each round. ``store`` and ``results/a`` lie in ``root``.

    The alignment ``a`` keeps three runs, of which the results are made. ``replacement.rlprobe`` has
    another run under the key of one that a second alignment keeps; ``all.rlprobe`` has all of them.
    """

    root: Path
    #: The run that is committed and replaced: key, what it declares, old and new scratch.
    key: str
    declared: dict[str, Any]
    old: Path
    new: Path
    kept: tuple[str, ...]
    manifests: dict[str, bytes]
    #: Of the results ``a`` of an alignment, and ``dumps`` of two dumps.
    verdicts: dict[str, str]

    @property
    def verdict(self) -> str:
        """Of the alignment's results."""
        return self.verdicts["a"]

    @classmethod
    def make(cls, root: Path) -> World:
        place = root / "place"
        place.mkdir(parents=True)
        with tarfile.open(_RELEASED) as archive:
            archive.extractall(place, filter="data")
        store = place / "store"
        kept = keys(store)
        small: dict[str, Any] = {"stages": ("actor_update",), "tensors": False}
        old = write_scratch(root / "old", **small)
        new = write_scratch(root / "new", seed=9, **small)
        declared = declare("benchmark", name="soak")
        key = run_key(declared)
        commit(new, root / "other", key, declared)
        export(root / "other", [key], root / "replacement.rlprobe")
        commit(old, store, key, declared)
        record_alignment(store, "more", [key])
        repair(store)
        export(store, [*kept, key], root / "all.rlprobe")
        shutil.rmtree(place / "results")
        _compare(place, kept)
        manifests = {
            "old": (store / "runs" / key / "manifest.json").read_bytes(),
            "new": (root / "other" / "runs" / key / "manifest.json").read_bytes(),
        }
        (place / "runs.rlprobe").unlink()
        shutil.rmtree(store / "tmp", ignore_errors=True)
        verdicts = {
            name: json.loads((place / "results" / name / "diagnosis.json").read_text())["verdict"]
            for name in ("a", "dumps")
        }
        return cls(place, key, declared, old, new, (*kept, key), manifests, verdicts)

    def bundle(self, name: str) -> Path:
        return self.root.parent / f"{name}.rlprobe"

    def copy(self, target: Path, *, store: bool = True, results: bool = True) -> Path:
        """A place of one's own; a store's files keep their links to its objects."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        if store:
            _copy_linked(self.root / "store", target / "store")
        if results:
            shutil.copytree(self.root / "results", target / "results")
        return target

    def job(self, scratch: Path, place: Path) -> dict[str, Any]:
        """What the driver needs to commit."""
        return {
            "scratch": str(scratch),
            "store": str(place / "store"),
            "key": self.key,
            "declared": self.declared,
        }

    @property
    def plan(self) -> dict[str, Any]:
        """``alignment.json`` of the results."""
        return dict(json.loads((self.root / "results/a/alignment.json").read_text()))

    def stages(self, pair: str = "target") -> list[str]:
        """Words for the stages that the alignment compares."""
        return _chosen(self.plan["pairs"][pair]["stages"])

    def sides(self, pair: str = "target") -> tuple[str, str]:
        """The two runs of a comparison, from a place."""
        plan = self.plan
        keys = [plan["runs"][plan["pairs"][pair][side]]["key"] for side in _SIDES]
        return f"store/runs/{keys[0]}", f"store/runs/{keys[1]}"


def _chosen(stages: Iterable[str]) -> list[str]:
    """Words for only these stages, as the workflow asks for each."""
    return [word for stage in stages for word in ("--stage", stage)]


def _compare(place: Path, kept: list[str]) -> None:
    """``results/a`` as the workflow makes it, from today's code."""
    before = Path.cwd()
    with tarfile.open(_RELEASED) as archive:
        plan = archive.extractfile("results/a/alignment.json")
        assert plan is not None
        data = plan.read()
    (place / "results" / "a").mkdir(parents=True)
    said = json.loads(data)
    sealed = json.dumps(seal.sealed(said))
    (place / "results" / "a" / "alignment.json").write_text(sealed)
    os.chdir(place)
    try:
        for pair, sides in said["pairs"].items():
            runs = [f"store/runs/{said['runs'][sides[s]]['key']}" for s in _SIDES]
            out = f"results/a/compare/{pair}"
            more = ["--pair", pair, *_chosen(sides["stages"]), "--no-fail", "-q"]
            assert main(["compare", *runs, "-o", out, *more]) == 0
        roles = said["pairs"]["target"]
        dumps = [f"store/runs/{said['runs'][roles[s]]['key']}/dump" for s in _SIDES]
        assert main(["compare", *dumps, "-o", "results/dumps", "--no-fail", "-q"]) == 0
        for name in ("a", "dumps"):
            assert main(["diagnose", f"results/{name}", "--no-fail", "-q"]) == 0
            assert main(["report", f"results/{name}", "-q"]) == 0
    finally:
        os.chdir(before)


def _copy_linked(source: Path, target: Path) -> None:
    """Copy a tree so that names of one file are names of one file again, apart from the source."""
    made: dict[int, Path] = {}
    for directory, _, names in os.walk(source):
        below = target / Path(directory).relative_to(source)
        below.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = Path(directory, name)
            inode = path.stat().st_ino
            if inode in made:
                (below / name).hardlink_to(made[inode])
            else:
                shutil.copy2(path, below / name)
                made[inode] = below / name
