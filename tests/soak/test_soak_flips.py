"""Is every flipped bit of a store and of results found, and named with its way back?"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rlprobe.store.repair import repair
from rlprobe.store.verify import verify
from tests.soak.conftest import Rounds
from tests.soak.driving import Driver
from tests.soak.world import World

#: Of a store, what holds nothing: who is at work, and unfinished work.
_NOTHING = ("locks", "tmp")
_EXIT = {0: "aligned", 3: "diverged", 4: "not_comparable"}


def contents(store: Path) -> list[Path]:
    """Every file of a store, once."""
    seen: dict[int, Path] = {}
    for path in sorted(store.rglob("*")):
        if path.is_file() and path.relative_to(store).parts[0] not in _NOTHING:
            seen.setdefault(path.stat().st_ino, path)
    return list(seen.values())


def flip(path: Path, chance: random.Random) -> tuple[int, int]:
    data = bytearray(path.read_bytes())
    at, bit = chance.randrange(len(data)), chance.randrange(8)
    data[at] ^= 1 << bit
    mode = path.stat().st_mode
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(data)
    path.chmod(mode)
    return at, bit


def test_every_flip_in_a_store_is_found_named_and_mended(
    world: World, rounds: Rounds, chance: random.Random, memory: Path, figures: Counter[str]
) -> None:
    store = world.copy(memory / "flips", results=False) / "store"
    paths = _forever(contents(store), chance)
    for _ in rounds(0.2, 25):
        path = next(paths)
        if not path.is_file() or not path.stat().st_size:
            continue
        where = (path.relative_to(store), *flip(path, chance))
        problems = verify(store).problems
        figures["flips in a store"] += 1
        figures["flips in a store that were not found"] += not problems
        assert problems, where
        assert all(problem.way for problem in problems), where
        named = "".join(str(problem) for problem in problems)
        assert path.name in named or path.parent.name in named, (where, named)
        done = repair(store, [world.bundle("all")])
        figures["flips in a store that were not mended"] += bool(done.now.problems)
        assert done.now.problems == [], (where, done.now.problems)
    assert (store / "runs" / world.key / "manifest.json").read_bytes() == world.manifests["old"]


def _forever(paths: list[Path], chance: random.Random) -> Iterator[Path]:
    while True:
        chance.shuffle(paths)
        yield from paths


def test_no_flip_in_results_changes_a_verdict(
    world: World, driver: Driver, rounds: Rounds, chance: random.Random, memory: Path,
    figures: Counter[str],
) -> None:  # fmt: skip
    place = world.copy(memory / "results")
    results = place / "results"
    names = sorted(p.relative_to(results) for p in results.rglob("*") if p.is_file())
    paths = _forever([name for name in names if name.suffix != ".html"], chance)
    for _ in rounds(0.15, 6):
        name = next(paths)
        path = results / name
        before = path.read_bytes()
        if not before:
            continue
        where = (name, *flip(path, chance))
        figures["flips in results"] += 1
        own = name.name == "diagnosis.json"
        command = ["verdict", "results/a/diagnosis.json"] if own else ["diagnose", "results/a"]
        ended = driver.run(*command, cwd=place)
        figures["tracebacks"] += ended.broke
        assert not ended.broke, (where, ended.said)
        if own:
            found = _EXIT.get(ended.code or 0)
        else:
            found = json.loads((results / "a/diagnosis.json").read_text())["verdict"]
        if ended.code in (1, 2):
            figures["flips in results that were refused"] += 1
        else:
            figures["wrong verdicts"] += found not in (world.verdict, "not_comparable")
            assert found in (world.verdict, "not_comparable"), where
        world.copy(place, store=False)
        (place / "store").symlink_to(world.root / "store")
