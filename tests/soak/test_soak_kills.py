"""Is everything there, and nothing half, whenever whatever works on it is killed?"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from rlprobe.files import digest
from rlprobe.store.read import keys
from rlprobe.store.verify import verify
from tests.soak.conftest import Rounds
from tests.soak.driving import Driver, Ended
from tests.soak.world import World

#: Commands on the store, and whether they are done again after the kill.
STORE = {
    "import": ["store", "import", "{all}"],
    "import --replace": ["store", "import", "--replace", "{replacement}"],
    "export": ["store", "export", "--alignment", "a", "-o", "b.rlprobe"],
    "gc": ["store", "gc"],
    "verify --repair": ["store", "verify", "--repair", "--from", "{all}"],
    "rm": ["store", "rm", "--force", "{key}"],
}
#: And of the store's size, so that the clock kills them in every part of their work.
ANALYSIS = {
    "compare": ["compare", "{benchmark}", "{target}", "-o", "results/a/compare/target", "--pair",
                "target", "--no-fail"],
    "diagnose": ["diagnose", "results/a"],
    "report": ["report", "results/a"],
}  # fmt: skip


def words(world: World, command: list[str]) -> list[str]:
    benchmark, target = world.sides()
    names = {"all": world.bundle("all"), "replacement": world.bundle("replacement"),
             "key": world.key, "benchmark": benchmark, "target": target}  # fmt: skip
    return [word.format(**names) for word in command]


def whole(ended: Ended) -> None:
    assert not ended.broke and ended.code == 0, ended.said


def prepare(world: World, name: str, place: Path) -> None:
    """A store on which the command has something to do."""
    world.copy(place, results=False)
    store = place / "store"
    if name == "gc":
        (store / "alignments" / "more.json").unlink()
        (store / "alignments" / "copies" / "more.json").unlink()
    if name == "verify --repair":
        for path in sorted((store / "objects").rglob("*"))[::9]:
            if path.is_file():
                path.chmod(0o644)
                path.write_bytes(b"damaged")
    if name in ("import", "commit"):
        for part in ("objects", "runs", "manifests", "alignments"):
            if name == "import":
                (store / part).rename(place / f"gone-{part}")


def calls_of(driver: Driver, world: World, name: str, place: Path) -> int:
    prepare(world, name, place)
    ended = run(driver, world, name, place)
    whole(ended)
    return ended.calls


def run(driver: Driver, world: World, name: str, place: Path, at: int | None = None) -> Ended:
    if name == "commit":
        return driver.run(cwd=place, at=at, commit=world.job(world.new, place))
    return driver.run(*words(world, STORE[name]), cwd=place, at=at)


@pytest.mark.parametrize("name", ["commit", *STORE])
def test_a_killed_command_on_the_store_loses_nothing_and_is_done_again(
    name: str, world: World, driver: Driver, rounds: Rounds, chance: random.Random,
    memory: Path, figures: Counter[str],
) -> None:  # fmt: skip
    place = memory / "kills"
    total = calls_of(driver, world, name, place)
    assert total > 3
    for _ in rounds(0.03, 2):
        at = chance.randint(1, total)
        prepare(world, name, place)
        store = place / "store"
        ended = run(driver, world, name, place, at)
        figures[f"kills: {name}"] += ended.killed
        figures["tracebacks"] += ended.broke
        assert ended.killed or ended.code == 0, ended.said
        kept = set(world.kept) - {world.key}
        if name in ("gc", "export", "commit", "import --replace", "rm"):
            assert kept <= set(keys(store)), (name, at)
        if name != "verify --repair":  # that one mends what it was given, when it is done again
            assert verify(store).problems == [], (name, at)
        if name == "rm":
            whole(_again(driver, world, place))
        elif name != "export" or not (place / "b.rlprobe").exists():
            whole(run(driver, world, name, place))
        found = verify(store)
        assert found.problems == [], (name, at)
        assert kept <= set(keys(store)), (name, at)
        manifest = store / "runs" / world.key / "manifest.json"
        if name in ("commit", "import --replace"):
            assert manifest.read_bytes() == world.manifests["new"], at
        if name in ("import", "verify --repair", "export"):
            assert manifest.read_bytes() == world.manifests["old"], at
        if name in ("gc", "rm"):
            assert not manifest.exists()
        assert not list((store / "tmp").glob("*")) or name in ("gc", "rm", "export"), (name, at)


def _again(driver: Driver, world: World, place: Path) -> Ended:
    """A run that is gone cannot be dropped again; what is left of it goes with the garbage."""
    driver.run(*words(world, STORE["rm"]), cwd=place)
    return driver.run("store", "gc", cwd=place)


@pytest.mark.parametrize("name", ANALYSIS)
def test_killed_analysis_never_changes_a_verdict_and_is_done_again(
    name: str, world: World, driver: Driver, rounds: Rounds, chance: random.Random,
    memory: Path, figures: Counter[str],
) -> None:  # fmt: skip
    place = world.copy(memory / "analysis")
    command = words(world, ANALYSIS[name])
    for _ in rounds(0.06, 2):
        ended = driver.run(*command, cwd=place, after=chance.uniform(0.005, 0.6))
        figures[f"kills: {name}"] += ended.killed
        figures["tracebacks"] += ended.broke
        assert ended.killed or ended.code == 0, ended.said
        judged = driver.run("diagnose", "results/a", cwd=place)
        figures["tracebacks"] += judged.broke
        assert not judged.broke and judged.code in (0, 1, 4), judged.said
        if judged.code == 0:  # what is not there yet is refused or not comparable, never judged
            figures["wrong verdicts"] += verdict(place) != world.verdict
            assert verdict(place) == world.verdict
        whole(driver.run(*words(world, ANALYSIS["compare"]), cwd=place))
        whole(driver.run("diagnose", "results/a", cwd=place))
        assert verdict(place) == world.verdict
        page = place / "results/a/report.html"
        assert page.read_text(encoding="utf-8").rstrip().endswith("</html>")
        # the next writer of a directory has cleared it
        left = list((place / "results").rglob(".*.tmp*"))
        assert left == []


def verdict(place: Path) -> str:
    return str(json.loads((place / "results/a/diagnosis.json").read_text())["verdict"])


def test_an_export_that_is_killed_goes_on_where_it_was(
    world: World, driver: Driver, rounds: Rounds, chance: random.Random, memory: Path,
    figures: Counter[str],
) -> None:  # fmt: skip
    place = world.copy(memory / "export", results=False)
    command = words(world, STORE["export"])
    whole(driver.run(*command, cwd=place))
    wanted = digest(place / "b.rlprobe")
    for _ in rounds(0.02, 1):
        (place / "b.rlprobe").unlink(missing_ok=True)
        ended = driver.run(*command, cwd=place, after=chance.uniform(0.002, 0.05))
        figures["kills: export"] += ended.killed
        if not (place / "b.rlprobe").exists():
            whole(driver.run(*command, cwd=place))
        assert digest(place / "b.rlprobe") == wanted
