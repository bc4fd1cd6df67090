"""Does ``rlprobe selftest`` take faults as documented, run the pipeline on each and score it?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_FAULTS = """
from rlprobe.selftest import benign, fault


@fault(stage="old_log_prob", module="model.layers.0.post_attention_layernorm",
       cause=("hyperparameter", "constant_factor"))
def other_epsilon(site):
    layer = site.model.get_submodule("model.layers.0.post_attention_layernorm")
    old = layer.variance_epsilon
    layer.variance_epsilon = old + site.strength * 1e-2
    yield
    layer.variance_epsilon = old


@fault(stage="critic_update", module=None, cause=("optimizer", "hyperparameter"))
def other_decay(site):
    groups = site.optimizer.param_groups
    kept = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = 10.0
    yield
    for group, decay in zip(groups, kept, strict=True):
        group["weight_decay"] = decay


@fault(stage="actor_update", module=None, cause="loss")
def broken(site):
    raise RuntimeError("this fault cannot be planted")
    yield


@benign()
def nothing(site):
    yield
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("selftest")


def _rlprobe(*words: str | Path) -> Any:
    return command(sys.executable, "-m", "rlprobe", "selftest", *words)


def test_the_quick_subset_finds_all_and_alarms_at_nothing(work: Path) -> None:
    done = _rlprobe("--quick", "--directory", work / "quick", "--json", work / "quick.json")
    assert done.returncode == 0, done.stdout
    rows = json.loads((work / "quick.json").read_text())
    assert len(rows) == 4
    assert [row["found"]["verdict"] for row in rows] == ["diverged"] * 3 + ["aligned"]
    assert all(row["found"]["module"] == row["expected"]["module"] for row in rows)
    assert "0 of 1 benign runs" in done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("rlprobe: ")]
    assert len(said) == 1 + len(rows), "what is collected, and a line per case"
    assert "records compared" in (work / "quick" / "logs" / f"{rows[0]['name']}.log").read_text()


@pytest.mark.long
def test_faults_of_ones_own_are_run_as_documented(work: Path) -> None:
    directory = work / "faults"
    directory.mkdir()
    (directory / "mine.py").write_text(_FAULTS)
    # what --quick collected serves these as well
    place, scores = work / "quick", work / "own.json"
    done = _rlprobe("--faults", directory, "--no-ray", "--directory", place, "--json", scores)
    rows = {row["name"]: row for row in json.loads((work / "own.json").read_text())}
    assert set(rows) == {"other_epsilon", "other_decay", "broken", "nothing"}

    # what cannot be planted is a miss of its own and stops nothing else
    assert done.returncode == 1, done.stdout
    assert rows["broken"]["found"]["verdict"] == "failed"
    assert "this fault cannot be planted" in rows["broken"]["error"]

    found = rows["other_epsilon"]["found"]
    assert found["verdict"] == "diverged"
    # slime's name of the stage is understood, the canonical one is given back
    assert found["stage"] == rows["other_epsilon"]["expected"]["stage"] == "actor_compute_log_prob"
    assert found["module"] == "model.layers.0.post_attention_layernorm"
    weakened = rows["other_epsilon"]["weakened"]
    assert 0 < weakened["strength"] < 0.5
    assert 1.5 <= weakened["ratio"] <= 2.8
    assert weakened["found"]["module"] == "model.layers.0.post_attention_layernorm"

    assert rows["other_decay"]["found"]["stage"] == "critic_update"
    assert rows["other_decay"]["weakened"]["reason"] == "it ignores its strength"
    assert rows["other_decay"]["weakened"]["found"] is None
    assert rows["nothing"]["found"]["verdict"] == "aligned"


def test_what_is_in_the_store_is_not_run_again(work: Path) -> None:
    """After a change of the diagnosis only comparing and judging are repeated."""
    before = sorted(path.name for path in (work / "quick" / "store" / "runs").iterdir())
    done = _rlprobe("--quick", "--directory", work / "quick", "--json", work / "again.json", "-v")
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in (work / "quick" / "store" / "runs").iterdir()) == before
    assert done.stdout.count("already in the store") == 2 * 4 + 4
    first, second = (json.loads((work / name).read_text()) for name in ("quick.json", "again.json"))
    assert [row["found"] for row in second] == [row["found"] for row in first]


def test_a_fault_that_is_not_there_is_one_clear_message(work: Path) -> None:
    done = _rlprobe("--only", "no_such_fault", "--directory", work / "none")
    assert done.returncode == 2
    assert "no fault or benign change is called 'no_such_fault'" in done.stdout
    assert "Traceback" not in done.stdout
