"""What msprobe really says on dumps that differ, beside what we say of the same dumps.

Each case is one of the traps of tests/unit/test_compare_traps.py. If a test here fails because
msprobe has learnt better, good: then its table deserves more trust than the documentation says.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import Forked
from tests.msprobe import dumps, tensors
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import Result, compared

pytestmark = [pytest.mark.msprobe, pytest.mark.slow]
pytest.importorskip("msprobe")

HERE = Path(__file__).parent
NAME = "Functional.linear.0.forward"


def _statistics(benchmark: Any, target: Any) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        dumps.write(place / "b", benchmark)
        dumps.write(place / "t", target)

    return make


def _with_tensors(benchmark: torch.Tensor, target: torch.Tensor) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        for side, value in (("b", benchmark), ("t", target)):
            tensors.write(place / side, {NAME: ([torch.ones(4)], [value])})

    return make


def _missing(place: Path) -> None:
    _with_tensors(torch.ones(9), torch.ones(9))(place)
    (place / f"t/dump_tensor_data/{NAME}.output.0.pt").unlink()


def _truncated(place: Path) -> None:
    _with_tensors(torch.ones(9), torch.ones(9))(place)
    file = place / f"t/dump_tensor_data/{NAME}.output.0.pt"
    file.write_bytes(file.read_bytes()[:-100])


ONE = {NAME: call([tensor()], [tensor()])}
RNG = torch.Generator().manual_seed(0)
X = torch.randn(16, 32, generator=RNG)

CASES: dict[str, Callable[[Path], None]] = {
    "nothing_matches": _statistics(ONE, {"Functional.gelu.0.forward": ONE[NAME]}),
    "benchmark_only": _statistics(
        {**ONE, "Module.norm.RMSNorm.forward.0": call([tensor()], [tensor()])}, ONE
    ),
    "under_the_rules": _statistics(
        ONE,
        {NAME: call([tensor((1.2, -1.2, 0.3, 2.4))], [tensor((1.4, -1.4, 0.35, 2.8))])},
    ),
    "dtype": _statistics(ONE, {NAME: call([tensor()], [tensor(dtype="torch.int32")])}),
    "permuted": _statistics(ONE, ONE),
    "missing": _missing,
    "truncated": _truncated,
    "opposite_infinities": _with_tensors(
        torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf])
    ),
    "large_integers": _with_tensors(torch.tensor([2**62, 1]), torch.tensor([2**62 + 4096, 1])),
}


@pytest.fixture(scope="module")
def cases(
    forked: Forked, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Any], Result]]:
    root = tmp_path_factory.mktemp("traps")
    jobs = []
    for name, make in CASES.items():
        make(root / name)
        jobs.append([str(root / name / s / "dump.json") for s in "tb"] + [str(root / name / "out")])
    (root / "pairs.json").write_text(json.dumps(jobs))
    done = forked.run(HERE / "run_msprobe.py", root / "pairs.json")
    assert done.returncode == 0, done.stdout
    found = {}
    for name in CASES:
        (written,) = (root / name / "out").glob("compare_result_*.csv")
        with written.open(newline="") as file:
            theirs = list(csv.DictReader(file))
        found[name] = theirs, compared(root / name / "b", root / name / "t", root / name / "ours")
    return found


@pytest.mark.parametrize("name", [n for n in CASES if n != "opposite_infinities"])
def test_msprobe_passes_every_row(cases: Any, name: str) -> None:
    theirs, _ = cases[name]
    assert theirs and {row["Result"] for row in theirs} == {"pass"}


@pytest.mark.parametrize("name", ["nothing_matches", "benchmark_only", "missing", "truncated"])
def test_we_call_too_little_compared_not_comparable(cases: Any, name: str) -> None:
    assert cases[name][1].lack is not None


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("missing", "unreadable"),
        ("truncated", "unreadable"),
        ("dtype", "dtype"),
        ("opposite_infinities", "nonfinite"),
    ],
)
def test_we_say_what_is_wrong_with_the_record(cases: Any, name: str, status: str) -> None:
    assert cases[name][1].status(f"{NAME}.output.0") == status


@pytest.mark.parametrize("name", ["under_the_rules", "large_integers"])
def test_we_measure_the_difference(cases: Any, name: str) -> None:
    row = cases[name][1].row(f"{NAME}.output.0")
    assert row["error"] > 0 and not row["identical"]


def test_opposite_infinities_have_no_error_with_msprobe(cases: Any) -> None:
    theirs, _ = cases["opposite_infinities"]
    assert float(theirs[1]["MaxAbsErr"]) == 0.0


def test_statistics_alone_cannot_see_a_permutation_and_we_do_not_claim_it(cases: Any) -> None:
    """Equal statistics are a lower bound of 0, of kind ``statistics``: no proof of equality."""
    row = cases["permuted"][1].row(f"{NAME}.output.0")
    assert (row["error"], row["error_kind"]) == (0.0, "statistics")
