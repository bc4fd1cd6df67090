"""Is a call that the disk refuses, at any place of any command, one sentence and no harm?

The ``n``-th call that changes the file system fails, and all of its kind after it, as on a disk
that is full, broken, or mounted read-only by then. Real full disks are in
``tests/unit/hostile/test_hostile_disks.py``.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from rlprobe.files import digest
from rlprobe.store.read import keys
from rlprobe.store.verify import verify
from tests.soak.conftest import Rounds
from tests.soak.driving import Driver, Ended
from tests.soak.test_soak_kills import ANALYSIS, STORE, verdict, whole, words
from tests.soak.world import World

FAILURES = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EMFILE, errno.ESTALE,
            errno.EACCES)  # fmt: skip
#: Commands on a store that is whole, and on results that are.
COMMANDS = {
    "commit": [],
    **{name: STORE[name] for name in ("import --replace", "export", "gc", "rm")},
    "verify": ["store", "verify", "--json", "v.json"],
    "show": ["store", "show", "{key}", "--json", "s.json"],
    "ls": ["store", "ls", "--json", "l.json"],
    "tree": ["store", "tree", "{key}", "t", "--copy"],
    **ANALYSIS,
    "report md": ["report", "results/a", "--format", "md"],
    "index": ["report", "--index", "results/a", "-o", "o.html"],
    "verdict": ["verdict", "results/a", "--json", "d.json"],
}


def run(
    driver: Driver, world: World, name: str, place: Path, at: int | None = None, number: int = 0
) -> Ended:
    if name == "commit":
        return driver.run(cwd=place, at=at, errno=number, commit=world.job(world.new, place))
    return driver.run(*words(world, COMMANDS[name]), cwd=place, at=at, errno=number)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_call_that_fails_is_one_sentence_and_no_harm(
    name: str, world: World, driver: Driver, rounds: Rounds, chance: random.Random, memory: Path,
    figures: Counter[str],
) -> None:  # fmt: skip
    place = world.copy(memory / "faults")
    ended = run(driver, world, name, place)
    assert not ended.broke and ended.code == 0, ended.said
    total = ended.calls
    assert total, "it writes nothing"
    bundle = place / "b.rlprobe"
    wanted = digest(bundle) if name == "export" else None
    for _ in rounds(0.2 / len(COMMANDS), 2):
        world.copy(place)
        at, number = chance.randint(1, total), chance.choice(FAILURES)
        where = (name, at, errno.errorcode[number])
        ended = run(driver, world, name, place, at, number)
        figures["calls that failed"] += 1
        if name == "commit":  # a library call: whoever calls it says what was raised
            assert ended.code in (0, 99) and not ended.hung, (where, ended.said)
            assert ended.code == 0 or os.strerror(number) in ended.said, (where, ended.said)
        else:
            figures["tracebacks"] += ended.broke
            assert not ended.broke and ended.code in (0, 1), (where, ended.said)
            if ended.code == 1:
                last = ended.said.strip().splitlines()[-1]
                assert last.startswith("rlprobe: error: "), (where, ended.said)
                assert os.strerror(number) in last or "found" in last, (where, ended.said)
        assert not [p for p in place.rglob(".*.tmp*") if "tmp" not in p.parent.parts], where
        kept = set(world.kept) - {world.key}
        assert kept <= set(keys(place / "store")), where
        assert verify(place / "store").problems == [], where
        assert verdict(place) == world.verdict, where
        if name == "export" and bundle.exists():  # only its name was not flushed to the disk
            assert digest(bundle) == wanted, where
            bundle.unlink()
        if name == "tree":
            shutil.rmtree(place / "t", ignore_errors=True)
        if name not in ("rm", "gc"):
            whole(run(driver, world, name, place))
        if name in ANALYSIS:
            whole(driver.run("diagnose", "results/a", cwd=place))
            assert verdict(place) == world.verdict, where
