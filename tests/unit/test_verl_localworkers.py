"""Do the processes of a run without Ray end, however many there are?"""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
from rlprobe.frameworks.verl.local.workers import Ranks

class Worker:
    def add(self, number):
        import os
        return int(os.environ["RANK"]) + number

ranks = Ranks(4, {})
ranks.create("actor", Worker, (), {})
print(ranks.call("actor", "add", [(10,)] * 4, [{}] * 4))
ranks.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_four_ranks_answer_and_end() -> None:
    """Each fork holds the pipes of those before it, which end only when all copies are closed."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("[10, 11, 12, 13]")
