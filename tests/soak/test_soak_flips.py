"""Is every flipped bit of a store and of results found, and named with its way back?"""

from __future__ import annotations

import fnmatch
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
    for _ in rounds(0.14, 25):
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


#: Of results, who reads what: a pattern, the commands that have to refuse it, and how it is mended.
_READERS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("diagnosis.json", ("verdict", "report", "report md", "index"), ("diagnose",)),
    ("alignment.json", ("diagnose", "verdict", "report"), ()),
    ("sides.json", ("diagnose", "verdict"), ("compare", "diagnose")),
    ("judged/*", ("report",), ("diagnose",)),
    ("report.html", ("index",), ("report",)),
    ("*", ("diagnose",), ("compare", "diagnose")),
)
#: Files that say nothing: locks, and marks whose name is all there is of them. And what is written
#: for people alone, which no command reads.
_SILENT = (".locks", ".of-", ".plan-", "verdict.txt", "records.csv")


def commands(world: World, which: str, pair: str = "target") -> dict[str, list[str]]:
    """What a user does with one of the results, by one word each; compares one pair of them."""
    benchmark, target = world.sides(pair)
    into = f"compare/{pair}" if which == "a" else ""
    below = "" if which == "a" else "/dump"
    results = f"results/{which}"
    more = ["--pair", pair, *world.stages(pair)] if which == "a" else []
    return {
        "compare": ["compare", benchmark + below, target + below, "-o", f"{results}/{into}",
                    *more, "--no-fail"],
        "diagnose": ["diagnose", results],
        "verdict": ["verdict", results],
        "report": ["report", results],
        "report md": ["report", results, "--format", "md"],
        "index": ["report", "--index", results, "-o", "overview.html"],
    }  # fmt: skip


def test_every_flip_in_results_is_found_named_and_mended(
    world: World, driver: Driver, rounds: Rounds, chance: random.Random, memory: Path,
    figures: Counter[str],
) -> None:  # fmt: skip
    place = world.copy(memory / "results")
    names = [
        path.relative_to(place / "results")
        for path in sorted((place / "results").rglob("*"))
        if path.is_file() and path.stat().st_size and not path.name.startswith(_SILENT)
        and path.parent.name not in _SILENT
    ]  # fmt: skip
    paths = _forever([place / "results" / name for name in names], chance)
    for number in rounds(0.08, 12):
        path = next(paths)
        which, _, inside = path.relative_to(place / "results").as_posix().partition("/")
        before = path.read_bytes()
        where = (path.relative_to(place), *flip(path, chance))
        if _says_the_same(before, path.read_bytes()):  # as 1E-5 does for 1e-5
            figures["flips in results that change no value"] += 1
            path.write_bytes(before)
            continue
        figures["flips in results"] += 1
        compared = inside.split("/")[1] if inside.startswith("compare/") else "target"
        known = commands(world, which, compared)
        _, refusing, mending = next(row for row in _READERS if fnmatch.fnmatch(inside, row[0]))
        for word in refusing:
            ended = driver.run(*known[word], cwd=place)
            figures["tracebacks"] += ended.broke
            assert not ended.broke, (where, ended.said)
            # of a version that was hit, it is said that a newer rlprobe must have made the file
            way = "again" in ended.said or "install the rlprobe that made it" in ended.said
            found = ended.code == 1 and path.name in ended.said and way
            figures["flips in results that were not found"] += not found
            assert found, (where, word, ended.code, ended.said)
        if mending and number % 10 == 0:  # by what was said
            for word in mending:
                ended = driver.run(*known[word], cwd=place)
                assert ended.code in (0, 4), (where, word, ended.said)
            ended = driver.run(*known["verdict"], cwd=place)
            figures["wrong verdicts"] += _EXIT.get(ended.code or 0) != world.verdicts[which]
            assert _EXIT.get(ended.code or 0) == world.verdicts[which], (where, ended.said)
            world.copy(place)
        path.write_bytes(before)


def _says_the_same(before: bytes, after: bytes) -> bool:
    try:
        return bool(json.loads(before) == json.loads(after))
    except ValueError:
        return False
