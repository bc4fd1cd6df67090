"""Dumps of MindSpore, which msprobe writes in the same form under other names of types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor

MODULE, CELL = "Module.fc1.Linear.forward.0", "Cell.net.fc1.Dense.forward.0"


def leaf(top: float, dtype: str = "Float32") -> dict[str, Any]:
    """A tensor as ``mindspore_processor.py`` of msprobe 26.2 has it."""
    found = tensor((top, -top, top / 10, 2 * top), (4, 8), dtype)
    del found["requires_grad"]
    return found | {"type": "mindspore.Tensor"}


def mindspore(directory: Path, made: float, dtype: str = "Float32") -> str:
    path = dumps.write(
        directory / "step0/rank0", {CELL: call([leaf(1.0, dtype)], [leaf(made, dtype)])}
    )
    path.write_text(path.read_text().replace('"pytorch"', '"mindspore"'))
    return str(directory)


@pytest.mark.parametrize(
    ("dtype", "off", "parts"),
    [
        ("Float32", 2.0**-24, False),
        ("Float32", 2.0**-9, True),
        ("BFloat16", 2.0**-9, False),
        ("BFloat16", 0.1, True),
        ("Float16", 2.0**-12, False),
    ],
)
def test_round_off_is_that_of_the_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, off: float, parts: bool
) -> None:
    sides = [
        mindspore(tmp_path / "b", 2.0, dtype),
        mindspore(tmp_path / "t", 2.0 * (1 + off), dtype),
    ]
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("First to part: net.fc1 (Dense)" if parts else "Nothing parts")


@pytest.mark.parametrize(
    ("own", "other", "code"),
    [
        ("torch.float32", "Float32", 0),
        ("torch.bfloat16", "BFloat16", 0),
        ("torch.float32", "Float16", 4),
    ],
)
def test_a_cell_mapping_compares_both_frameworks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: str, other: str, code: int
) -> None:
    """As ``msprobe compare -cm`` does; another precision is another type all the same."""
    numbers = (tensor((top, -top, top / 10, 2 * top), (4, 8), own) for top in (1.0, 2.0))
    given, made = numbers
    dumps.write(tmp_path / "b/step0/rank0", {MODULE: call([given], [made])})
    rules = tmp_path / "cells.yaml"
    rules.write_text("net.fc1.Dense: fc1.Linear\n")
    sides = [str(tmp_path / "b"), mindspore(tmp_path / "t", 2.0, other)]
    assert main(["compare", *sides, "-o", str(tmp_path / "o"), "--rules", str(rules)]) == code
    said = "".join(capsys.readouterr())
    assert ("Nothing parts" in said) is (code == 0) and ("dtypes differ" in said) is (code == 4)


def pytorch(directory: Path) -> str:
    made = [tensor((2.0, -2.0, 0.2, 4.0), (4, 8), "torch.float32")]
    dumps.write(directory / "step0/rank0", {"Module.net.fc1.Linear.forward.0": call([], made)})
    return str(directory)


def without(side: str, pattern: str) -> None:
    """A header that lacks a key."""
    (path,) = Path(side).rglob("dump.json")
    path.write_text(path.read_text().replace(pattern, ""))


def last(side: str) -> None:
    """A header that follows its records."""
    (path,) = Path(side).rglob("dump.json")
    held = json.loads(path.read_text())
    path.write_text(json.dumps({"data": held.pop("data"), **held}))


@pytest.mark.parametrize("changed", ["nothing", "no word for it", "header last"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_pair_of_two_frameworks_is_said_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: str, turned: bool
) -> None:
    sides = {"MindSpore": mindspore(tmp_path / "m", 2.0), "PyTorch": pytorch(tmp_path / "p")}
    for name, side in sides.items():
        if changed == "no word for it":
            without(side, f'"framework": "{name.lower()}", ')
        elif changed == "header last":
            last(side)
    names = list(sides) if turned else list(sides)[::-1]
    out = tmp_path / "o"
    both = [sides[name] for name in names]
    assert main(["compare", *both, "-o", str(out), "--coverage", "0"]) == 0
    sentence = f"the benchmark was dumped in {names[0]}, the target in {names[1]}"
    assert sentence in capsys.readouterr().out
    assert main(["diagnose", str(out), "--no-fail"]) == 0
    gate = {g["item"]: g for g in json.loads((out / "diagnosis.json").read_text())["gate"]}
    assert [item for item, g in gate.items() if sentence in g["evidence"]] == ["framework"]
    assert main(["report", str(out)]) == 0
    assert sentence in (out / "report.html").read_text()


@pytest.mark.parametrize("kind", ["PyTorch", "MindSpore"])
def test_one_framework_is_not_spoken_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    sides = [
        mindspore(tmp_path / s, 2.0) if kind == "MindSpore" else pytorch(tmp_path / s) for s in "bt"
    ]
    without(sides[0], f'"framework": "{kind.lower()}", ')
    assert main(["compare", *sides, "-o", str(tmp_path / "o")]) == 0
    assert "was dumped in" not in "".join(capsys.readouterr())
