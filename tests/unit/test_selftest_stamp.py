"""Is a trial's diagnosis taken again only where nothing it was made from has changed?"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlprobe
from rlprobe.diagnose import diagnosis
from rlprobe.selftest import stamp


def runs(target: str = "b") -> Any:
    return {"benchmark": SimpleNamespace(key="a"), "target": SimpleNamespace(key=target)}


def write(directory: Path) -> None:
    found = diagnosis.Diagnosis("aligned", "…", [], None, None, {}, {}, [])
    (directory / diagnosis.NAME).write_text(json.dumps(found.as_dict()), encoding="utf-8")


def test_the_same_runs_and_code_give_what_is_there(tmp_path: Path) -> None:
    write(tmp_path)
    assert stamp.kept(tmp_path, stamp.of(runs())) is None, "nothing says what it was made from"
    stamp.write(tmp_path, stamp.of(runs()))
    found = stamp.kept(tmp_path, stamp.of(runs()))
    assert found is not None and found.verdict == "aligned"
    assert stamp.kept(tmp_path, stamp.of(runs("c"))) is None


def test_another_code_judges_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    (package / "diagnose").mkdir(parents=True)
    source = package / "diagnose" / "run.py"
    source.write_text("1", encoding="utf-8")
    monkeypatch.setattr(rlprobe, "__file__", str(package / "__init__.py"))
    digests = []
    for text in ("1", "2", "1"):
        source.write_text(text, encoding="utf-8")
        stamp.code.cache_clear()
        digests.append(stamp.code())
    stamp.code.cache_clear()
    assert digests[0] == digests[2] != digests[1]


def test_what_judges_is_found_by_its_imports() -> None:
    """So that a room that moves, or a new one, is not forgotten."""
    root = Path(rlprobe.__file__).parent
    reached = {str(file.relative_to(root)) for file in stamp._reached(root)}
    assert {
        "judge/noise.py",
        "dumps/records.py",
        "compare/match/rules.yaml",
        "stages.py",
    } <= reached
    # of rooms that run a training, what a run is described by, and nothing that runs
    running = {file for file in reached if file.startswith(("capture/", "frameworks/"))}
    assert running <= {
        "capture/__init__.py",
        "capture/session.py",
        "frameworks/__init__.py",
        "frameworks/adopted.py",
        "frameworks/layout.py",
    }
    assert not any(file.startswith("report/") for file in reached)


def test_a_damaged_diagnosis_is_made_again(tmp_path: Path) -> None:
    (tmp_path / diagnosis.NAME).write_text("{", encoding="utf-8")
    stamp.write(tmp_path, stamp.of(runs()))
    assert stamp.kept(tmp_path, stamp.of(runs())) is None


def test_a_refinement_by_other_code_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not stamp.is_refined(tmp_path)
    (tmp_path / "refine").mkdir()
    stamp.write_refined(tmp_path)
    assert stamp.is_refined(tmp_path)
    root = Path(rlprobe.__file__).parent
    reached = {str(f.relative_to(root)) for f in stamp._reached(root, stamp._REFINING)}
    assert {"refine/observe.py", "refine/experiments.py", "refine/region.py",
            "refine/meaning.py"} <= reached  # fmt: skip
    monkeypatch.setattr(stamp, "_REFINING", ("rlprobe.refine.trace",))
    assert not stamp.is_refined(tmp_path)
