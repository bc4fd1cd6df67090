"""What `make test` leaves out is run by the target of its room."""

from __future__ import annotations

import re
from pathlib import Path

#: Rooms of tests whose ``long`` ones a target runs, all of them.
ROOMS = {
    "tests/unit": "families",
    "tests/workflow": "families",
    "tests/e2e": "e2e-long",
    "tests/slime": "e2e-long",
    "tests/cluster": "cluster",
    "tests/engines": "engines",
}


def test_every_long_test_is_in_a_room_that_a_target_runs(root: Path) -> None:
    marked = {
        "/".join(path.relative_to(root).parts[:2])
        for path in (root / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.long", path.read_text(encoding="utf-8"))
    }
    assert marked <= ROOMS.keys(), f"no target runs the long tests of {marked - ROOMS.keys()}"
    rules = "\n".join(path.read_text() for path in [root / "Makefile", *root.glob("*.mk")])
    for room, target in ROOMS.items():
        recipe = re.search(rf"^{target}: \$\(STAMP\)\n((?:\t.*\n)+)", rules, re.MULTILINE)
        assert recipe is not None, target
        assert re.search(rf"{room}(?![\w/])", recipe[1]), f"make {target} runs no long {room}"
        assert "not long" not in recipe[1]
