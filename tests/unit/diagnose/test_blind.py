"""Would anything that was recorded read as agreement if it were wrong?"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe.capture import key_data
from rlprobe.cli import main
from rlprobe.diagnose.diagnosis import GateItem
from rlprobe.dumps.key_data import KeyData
from rlprobe.errors import UsageError
from rlprobe.judge.extent import Extent
from rlprobe.selftest.blind import disturb, quantities, run, score
from rlprobe.selftest.blind.laboratory import Judgement, Laboratory
from tests.unit.diagnose.conftest import Alignment, aligner
from tests.unit.diagnose.planted import FORWARD
from tests.unit.diagnose.transformer import Device

pytestmark = [pytest.mark.slow]
#: Of some thousands; `rlprobe selftest --pass blind` disturbs hundreds of every kind of alignment.
SAMPLE = 24


@pytest.fixture(scope="module")
def aligned(
    collected: Callable[[Device, str, str | None], Any], tmp_path_factory: pytest.TempPathFactory
) -> Alignment:
    alignment = aligner(collected, tmp_path_factory.mktemp("blind"))(Device(split=True))
    assert main(["diagnose", str(alignment.results)]) == 0
    return alignment


@pytest.fixture(scope="module")
def found(aligned: Alignment, tmp_path_factory: pytest.TempPathFactory) -> score.Sensitivity:
    return run.disturbed(aligned.results, tmp_path_factory.mktemp("laboratory"), SAMPLE, seed=7)


def test_nothing_that_was_recorded_can_be_wrong_in_silence(found: score.Sensitivity) -> None:
    assert [(t.kind, t.name, t.way) for t in found.silent] == []
    assert found.unlike == []
    shares = found.shares()
    assert shares[score.NOTICED] > 0.7, "most is judged, and not only declared unjudged"


def test_it_is_noticed_by_what_it_says_and_not_as_another_run(found: score.Sensitivity) -> None:
    """A run that was made again since it was compared is refused, which would hide everything."""
    assert [trial.why for trial in found.trials if "made again" in trial.why] == []


def test_the_alignment_itself_is_as_it_was(aligned: Alignment, found: score.Sensitivity) -> None:
    """A disturbance is made in a copy; hard links lead nowhere back."""
    assert len(found.trials) == SAMPLE
    assert sum(found.as_dict()["outcomes"].values()) == SAMPLE, "samples of several seeds add up"
    assert main(["diagnose", str(aligned.results)]) == 0
    assert main(["store", "verify", "--store", str(aligned.store)]) == 0


def test_the_sample_has_every_kind_and_is_the_same_again() -> None:
    some = [
        quantities.Quantity(kind, None, "f", n, (kind, str(n % 3)), f"{kind}{n}", None, None)
        for kind in quantities.WAYS
        for n in range(20)
    ]
    count = 3 * sum(map(len, quantities.WAYS.values()))
    first = quantities.sample(some, count, seed=3)
    assert first == quantities.sample(some, count, seed=3) != quantities.sample(some, count, 4)
    assert {(q.kind, way) for q, way in first} == {
        (kind, way) for kind, ways in quantities.WAYS.items() for way in ways
    }
    assert len(quantities.sample(some, None, seed=3)) == sum(
        20 * len(ways) for ways in quantities.WAYS.values()
    )


def test_only_what_is_aligned_can_be_disturbed(
    collected: Callable[[Device, str, str | None], Any], tmp_path: Path
) -> None:
    epsilon = next(fault for fault in FORWARD if fault.name == "epsilon of a norm")
    alignment = aligner(collected, tmp_path)(Device(faults=epsilon.faults, stage=epsilon.only))
    with pytest.raises(UsageError, match="diverged"):
        run.disturbed(alignment.results, tmp_path / "laboratory", 1)


def test_what_was_said_before_is_no_silence_and_what_was_not_is() -> None:
    plain = Judgement("aligned", [GateItem("weights", "open", "…")], {})
    assert score.outcome(plain, plain, None)[0] == score.SILENT
    assert score.outcome(plain, plain, "given") == (score.DECLARED, "given")
    assert score.outcome(plain, "a file is damaged", None)[0] == score.NOTICED
    assert score.outcome(plain, plain, None, below=True)[0] == score.BELOW


def test_a_caveat_that_says_more_is_said_and_one_that_says_the_same_is_silence() -> None:
    """A second thing wrong of one kind changes no state; whoever reads the item sees it."""

    def judgement(weights: str, alike: str) -> Judgement:
        items = [GateItem("weights", "open", weights), GateItem("recorded alike", "caveat", alike)]
        return Judgement("aligned", items, {})

    before = judgement("51 agree", "a differs")
    assert score.outcome(before, judgement("51 agree", "a, b differ"), None) == (
        score.SAID, "recorded alike says more",
    )  # fmt: skip
    assert score.outcome(before, before, None)[0] == score.SILENT
    # an item that agrees says so, with whatever figures
    assert score.outcome(before, judgement("50 agree", "a differs"), None)[0] == score.SILENT


def test_only_a_zero_for_what_is_no_more_than_round_off_is_below_its_floor() -> None:
    some = quantities.Quantity("record", None, "f", 0, ("record",), "loss", 3.0, None)
    assert quantities.is_below(some, quantities.ZERO)
    assert not quantities.is_below(some, quantities.NAN)
    for floor in (None, 0.5):
        assert not quantities.is_below(dataclasses.replace(some, floor=floor), quantities.ZERO)


def test_a_laboratory_that_would_notice_nothing_but_itself_is_refused(
    aligned: Alignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every disturbance would seem noticed where comparisons are bound to the run as it was."""
    monkeypatch.setattr(Laboratory, "_of_no_run", lambda _: None)
    with pytest.raises(UsageError, match="compare again"):
        run.disturbed(aligned.results, tmp_path / "laboratory", 1)


def test_what_is_judged_in_part_must_be_what_the_whole_says(
    aligned: Alignment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laboratory that keeps what it should judge anew would call everything silent, or nothing:
    both are told apart from blindness by judging some disturbances as a whole."""
    monkeypatch.setattr(Laboratory, "_untouched", lambda laboratory, *_: laboratory._kept)
    records = [quantities.RECORD]
    monkeypatch.setattr(
        quantities, "sample", lambda found, count, seed: [
            (next(one for one in found if one.kind == kind and one.declared is None),
             quantities.NAN) for kind in records[:count]
        ],
    )  # fmt: skip
    found = run.disturbed(aligned.results, tmp_path / "laboratory", 1)
    assert found.unlike
    assert any("as a whole" in short for short in score.shortfalls([found]))


def test_each_key_is_judged_in_part_as_the_whole_is(aligned: Alignment, tmp_path: Path) -> None:
    """Of key data only what a key is of, and what is made of it, is found anew."""
    laboratory = Laboratory(aligned.results, tmp_path)
    found = quantities.of(laboratory.examined)
    first = {one.key: one for one in found if one.kind == quantities.KEY_DATA}
    assert {"old_log_probs", "advantages", "responses"} <= first.keys()
    for number, one in enumerate(first.values()):
        way = (quantities.TEN_FLOORS, quantities.CONTRADICTION, quantities.NAN)[number % 3]
        assert run._is_alike(laboratory, one, way), (one.key, way)


@pytest.mark.long
def test_several_processes_find_what_one_does(aligned: Alignment, tmp_path: Path) -> None:
    one, two = (
        run.disturbed(aligned.results, tmp_path / str(jobs), 6, seed=3, jobs=jobs)
        for jobs in (1, 2)
    )
    assert len(one.trials) == 6 and set(one.trials) == set(two.trials)


@pytest.mark.parametrize("way", quantities.WAYS[quantities.KEY_DATA])
def test_key_data_are_disturbed_with_the_statistics_beside_them(tmp_path: Path, way: str) -> None:
    """Else every disturbance of them would be noticed as a contradiction, and as nothing else."""
    kept = "dump/data/values/step0/rank0/micro_step0/values"
    key_data.write(tmp_path / "dump", "values", 0, 0, 0, np.linspace(-1, 1, 12, dtype=np.float32))
    one = quantities.Quantity(
        quantities.KEY_DATA, None, f"{kept}.npy", None, ("key_data",), "values", 1e-6, None
    )
    made = disturb.contents(tmp_path, one, way)
    for name, data in made.items():
        (tmp_path / name).unlink()
        if data is not None:
            (tmp_path / name).write_bytes(data)
    left = {path.name for path in (tmp_path / kept).parent.iterdir()}
    assert left == (set() if way == quantities.MISSING else {"values.npy", "values.json"})
    found = KeyData(tmp_path / "dump" / "data").contradicted(0) if left else {}
    assert bool(found) == (way == quantities.CONTRADICTION)


@pytest.mark.parametrize(
    ("way", "changed"),
    [
        (quantities.TEN_FLOORS, {"digest", "norm", "sketch"}),
        (quantities.NAN, {"digest", "norm", "sketch"}),
        (quantities.ZERO, {"digest", "norm", "sketch"}),
        (quantities.DTYPE, {"digest", "dtype"}),
        (quantities.CONTRADICTION, {"norm"}),
    ],
)
def test_a_weight_is_disturbed_in_all_that_says_it(
    tmp_path: Path, way: str, changed: set[str]
) -> None:
    row = {"name": "w", "dtype": "torch.float32", "digest": "sha256:ab", "norm": 2.0,
           "sketch": [1.0, -1.0]}  # fmt: skip
    pl.DataFrame([row]).write_parquet(tmp_path / "weights.parquet")
    one = quantities.Quantity(
        quantities.WEIGHT, None, "weights.parquet", 0, ("weight",), "w", None, None
    )
    data = disturb.contents(tmp_path, one, way)["weights.parquet"]
    assert data is not None
    other = pl.read_parquet(io.BytesIO(data)).row(0, named=True)
    assert {name for name in row if str(row[name]) != str(other[name])} == changed


def test_what_is_only_gone_is_not_said() -> None:
    """Fewer that are judged, of fewer that were recorded, tells nobody that any is missing."""
    judgement = [
        Judgement("aligned", [], {"actor_update": {0: Extent(n, n, {}, unjudged)}})
        for n, unjudged in ((9, {}), (8, {}), (8, {"no_partner": 1}))
    ]
    assert score.outcome(judgement[0], judgement[1], None)[0] == score.SILENT
    assert score.outcome(judgement[0], judgement[2], None)[0] == score.SAID


@pytest.mark.parametrize(
    ("way", "value"),
    [(quantities.TEN_FLOORS, [0.99, 1.0989]), (quantities.NAN, ["nan", "nan"]),
     (quantities.ZERO, [0, 0]), (quantities.MISSING, None)],
)  # fmt: skip
def test_what_an_optimizer_was_told_is_disturbed_alone(
    tmp_path: Path, way: str, value: Any
) -> None:
    told = {"lr": 1e-3, "betas": [0.9, 0.999], "amsgrad": False}
    lines = [{"groups": [{"settings": told, "names": ["w"]}]}]
    (tmp_path / "optimizers.json").write_text(json.dumps({"optimizers": lines}))
    one = quantities.Quantity(
        quantities.SETTING, None, "optimizers.json", 0, ("setting",), "b", None, None, key="0/betas"
    )
    data = disturb.contents(tmp_path, one, way)["optimizers.json"]
    assert data is not None
    found = json.loads(data)["optimizers"][0]["groups"][0]["settings"]
    assert found.get("betas") == (pytest.approx(value) if way == quantities.TEN_FLOORS else value)
    assert {**found, "betas": None} == told | {"betas": None}
