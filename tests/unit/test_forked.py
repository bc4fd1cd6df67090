"""Does a program in a fork run as it would in a process of its own?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import Forked


@pytest.fixture(scope="module")
def quick(root: Path) -> Iterator[Forked]:
    started = Forked(("json",), root)
    yield started
    started.close()


def test_its_words_environment_and_output_are_its_own(quick: Forked) -> None:
    text = "import os, sys; print(sys.argv[1:], os.environ['ASKED'], __name__)"
    done = quick.run(text, "a", Path("b"), env={"ASKED": "yes"})
    assert (done.returncode, done.stdout) == (0, "['a', 'b'] yes __main__\n")


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("import os; os.abort()", -6, ""),
    ],
)
def test_a_failure_is_told(quick: Forked, text: str, status: int, said: str) -> None:
    done = quick.run(text)
    assert done.returncode == status
    assert said in done.stdout


def test_what_one_patches_the_next_does_not_see(quick: Forked) -> None:
    assert quick.run("import json, os; json.loads = None; os.environ['LEFT'] = '1'").stdout == ""
    done = quick.run("import json, os; print(json.loads('1'), 'LEFT' in os.environ)")
    assert done.stdout == "1 False\n"
