"""Random dump pairs against exact arithmetic: no disagreement, no traceback.

10,000 pairs whatever the minutes: ``RLPROBE_FUZZ_PAIRS=10000 pytest
tests/unit/compare/test_compare_random.py``, six minutes of one core.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

from tests.soak.conftest import SEED, Rounds
from tests.unit.compare.test_compare_random import check

#: Beyond the seeds of the fixed sample.
_FIRST = 1_000_000


def test_random_pairs_are_what_exact_arithmetic_says(
    tmp_path: Path, rounds: Rounds, figures: Counter[str]
) -> None:
    wrong = []
    for number in rounds(0.12, 20):
        seed = _FIRST + SEED % _FIRST * 1000 + number
        try:
            check(seed, tmp_path / "pair")
        except Exception as error:  # noqa: BLE001 - disagreements and tracebacks are all listed
            wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:600]}")
        shutil.rmtree(tmp_path / "pair", ignore_errors=True)
        figures["dump pairs compared"] += 1
    figures["wrong values of dump pairs"] += len(wrong)
    assert not wrong, "\n".join(wrong[:10])
