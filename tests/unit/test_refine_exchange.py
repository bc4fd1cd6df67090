"""The target's suspect is run on what the benchmark's was given: is the difference made there?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rlprobe.capture.trace import exchange as capture  # noqa: E402
from rlprobe.refine import exchange  # noqa: E402
from tests.unit.capture_helpers import rank_dir  # noqa: E402
from tests.unit.traced import backward, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

Change = Callable[[nn.Module], None]


def nothing(made: Any) -> None:
    """The benchmark's own code."""


def earlier(made: Any) -> None:
    """What the norm is given is wrong, and not the norm."""
    up = made.layers[0].up
    right = up.forward
    up.forward = lambda x: 1.5 * right(x)


def exchanged(tmp_path: Path, change: Change, **options: Any) -> tuple[dict[str, Any], Any]:
    """What the target reports, and its weights after the step."""
    run(tmp_path / "b", keep_outputs=True, tensor_budget=options.pop("budget", None))
    there = rank_dir(tmp_path / "b") / "outputs"
    _, weights = run(tmp_path / "t", change, kind=None, substitute=str(there), **options)
    path = rank_dir(tmp_path / "t") / capture.DIRECTORY / capture.REPORT
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len(lines) < 2, "one call is enough"
    return (lines[0] if lines else {}), weights


def test_the_same_code_makes_the_same_of_it(tmp_path: Path) -> None:
    found, _ = exchanged(tmp_path, nothing)
    assert found["failed"] is None and found["outputs"] == {"0": 0.0}
    assert found["gradients"] == {"input 0": 0.0, "weight": 0.0}


def test_what_it_was_given_is_told_from_what_it_computes(tmp_path: Path) -> None:
    found, _ = exchanged(tmp_path / "i", earlier)
    assert found["outputs"] == {"0": 0.0} and max(found["gradients"].values()) == 0.0
    own, _ = exchanged(tmp_path / "o", wrapped(lambda y: 1.5 * y))
    assert own["outputs"]["0"] == pytest.approx(0.5)
    back, _ = exchanged(tmp_path / "g", backward(lambda g: 3 * g))
    assert back["outputs"]["0"] < 1e-6
    assert back["gradients"] == {"input 0": pytest.approx(0, abs=1e-6), "weight": pytest.approx(2)}


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    noisy = wrapped(lambda y: nn.functional.dropout(y, 0.1))
    _, weights = exchanged(tmp_path, noisy)
    (tmp_path / "b" / "none").mkdir()
    there = rank_dir(tmp_path / "b") / "outputs"
    for file in (rank_dir(tmp_path / "b") / capture.DIRECTORY).iterdir():
        file.unlink()
    _, plain = run(tmp_path / "p", noisy, kind=None, substitute=str(there))
    assert all(torch.equal(weights[name], plain[name]) for name in plain)


def test_beyond_the_budget_nothing_is_tried(tmp_path: Path) -> None:
    found, _ = exchanged(tmp_path, nothing, budget=100)
    assert not found.get("outputs") and not found.get("gradients")


@pytest.mark.parametrize(
    ("entry", "floor", "said"),
    [
        (exchange.Entry({"0": 0.5}), 1e-3, "by 0.5: the difference is made here"),
        (exchange.Entry({"0": 1e-6}, {"weight": 0.1}), 1e-3,
         "others by 0.1 at most (weight): the difference is made here"),
        (exchange.Entry({"0": 1e-6}, {"weight": 1e-5}), 1e-3, "no more than noise"),
        (exchange.Entry({"0": "inf"}), 1e-3, "by inf: the difference is made here"),
        (exchange.Entry({"0": "nan"}), 1e-3, "makes numbers that are not finite"),
        (exchange.Entry({"0": 1e-6, "1": "nan"}), 1e-3, "makes numbers that are not finite"),
        (exchange.Entry({"0": 1e-6}, {"x": "nan"}), 1e-3, "makes numbers that are not finite"),
        (exchange.Entry({"0": 0.5}), 0.0, "from the benchmark's by 0.5"),
        (exchange.Entry(failed="no"), 1e-3, "could not be run on what the benchmark's was given"),
    ],
)  # fmt: skip
def test_it_is_said_in_words(entry: exchange.Entry, floor: float, said: str) -> None:
    found = exchange.said(entry, "model.norm", floor)
    assert found is not None and said in found
    assert exchange.said(exchange.Entry(), "model.norm", floor) is None


def test_of_a_call_before_the_one_that_parts_nothing_follows() -> None:
    alike, apart = exchange.Entry({"0": 1e-6}), exchange.Entry({"0": 0.5})
    found = exchange.said(alike, "attn", 1e-3, later=True)
    assert found is not None and found.endswith(
        "no more than noise, in a call before the one that parts"
    )
    found = exchange.said(apart, "attn", 1e-3, later=True)
    assert found is not None and "the difference is made here" in found
