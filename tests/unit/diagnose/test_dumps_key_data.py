"""Is key data of two dumps judged as that of two runs is, or said to be unjudged?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from rlprobe import stages
from rlprobe.cli import main
from rlprobe.judge import reasons
from rlprobe.judge.inputs import Results
from rlprobe.roles import BENCHMARK, TARGET
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor
from tests.unit.diagnose.conftest import Align
from tests.unit.diagnose.test_diagnose_dumps import model, states
from tests.unit.diagnose.transformer import Device

pytestmark = pytest.mark.slow

STAGE = stages.LOG_PROB
PROMPTS, RESPONSES = [[1, 2], [3, 4]], [[10, 11, 12], [13, 14, 15]]
Values = Sequence[Sequence[float]]
LOG_PROBS = [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]


def save(side: Path, key: str, rows: Any, step: int = 0) -> None:
    directory = side / "data" / key / f"step{step}" / "rank0" / "micro_step0"
    directory.mkdir(parents=True)
    np.save(directory / f"{key}.npy", np.asarray(rows))
    (directory / f"{key}.json").write_text(json.dumps({"data": {}}))


def side(
    path: Path,
    others: dict[str, Any],
    step: int = 0,
    stage: str = STAGE,
    responses: Any = None,
) -> Path:
    dumps.write(path / stage / f"step{step}/rank0", model())
    save(path, "prompts", PROMPTS, step)
    save(path, "responses", RESPONSES if responses is None else responses, step)
    for key, rows in others.items():
        save(path, key, np.asarray(rows, np.float32), step)
    return path


def changed(place: tuple[int, int], value: float) -> Values:
    rows = np.array(LOG_PROBS)
    rows[place] = value
    found: Values = rows.tolist()
    return found


def compare(tmp: Path, *options: str) -> int:
    out = str(tmp / "out")
    return main(["compare", str(tmp / "b"), str(tmp / "t"), "-o", out, *options])


def diagnose(tmp: Path) -> Any:
    assert main(["diagnose", str(tmp / "out")]) in (0, 4)
    return json.loads((tmp / "out/diagnosis.json").read_text())


def judged(tmp: Path, name: str, stage: str = STAGE) -> dict[str, Any]:
    table = pl.read_parquet(tmp / f"out/judged/{stage}.parquet")
    return table.row(by_predicate=(pl.col("name") == name) & (pl.col("step") == 0), named=True)


@pytest.mark.parametrize("key", ["old_log_probs", "entropys"])
@pytest.mark.parametrize(
    ("value", "said", "cause"),
    [
        (-4.5, "error 0.0524", None),
        (np.nan, "not finite at 1 of 6 values on the target only", "nonfinite"),
        (np.inf, "not finite at 1 of 6 values on the target only", "nonfinite"),
    ],
)
def test_a_result_that_parts_is_the_verdict(
    tmp_path: Path,
    key: str,
    value: float,
    said: str,
    cause: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    side(tmp_path / "b", {key: LOG_PROBS})
    side(tmp_path / "t", {key: changed((1, 0), value)})
    assert compare(tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"First to part: {key}" in printed and said in printed
    assert "Nothing parts" not in printed
    found = diagnose(tmp_path)
    assert found["verdict"] == "diverged", found["sentence"]
    assert (found["first"]["stage"], found["first"]["operator"]) == (STAGE, key)
    assert cause is None or found["cause"]["class"] == cause
    assert main(["verdict", str(tmp_path / "out")]) == 3
    assert judged(tmp_path, key)["beyond"]
    assert reasons.GIVEN in found["extent"][STAGE]["0"]["unjudged"]  # prompts and responses
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/report.html").read_text()
    assert key in page[page.index("<body") :]


def test_equal_key_data_is_judged_and_agrees(tmp_path: Path) -> None:
    for name in "bt":
        side(tmp_path / name, {"old_log_probs": LOG_PROBS})
    assert compare(tmp_path, "-q") == 0
    assert diagnose(tmp_path)["verdict"] == "aligned"
    row = judged(tmp_path, "old_log_probs")
    assert row["judged"] and not row["beyond"] and row["count"] == 6


def test_other_token_ids_shut_the_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    side(tmp_path / "b", {"old_log_probs": LOG_PROBS})
    side(tmp_path / "t", {"old_log_probs": LOG_PROBS}, responses=[RESPONSES[0], [13, 99, 15]])
    assert compare(tmp_path) == 0
    assert "old_log_probs: 1 row joined by sample, 1 on the benchmark only" in (
        capsys.readouterr().out
    )
    found = diagnose(tmp_path)
    assert found["verdict"] == "not_comparable"
    assert states(found)["tokens"] == "shut" and "1 of the benchmark's 2 samples" in str(found)
    assert main(["verdict", str(tmp_path / "out")]) == 4


def test_more_samples_on_one_side_are_said_and_shut_nothing(tmp_path: Path) -> None:
    side(tmp_path / "b", {"old_log_probs": LOG_PROBS})
    dumps.write(tmp_path / f"t/{STAGE}/step0/rank0", model())
    for key, rows in (
        ("prompts", PROMPTS[:1]),
        ("responses", RESPONSES[:1]),
        ("old_log_probs", np.asarray(LOG_PROBS[:1], np.float32)),
    ):
        save(tmp_path / "t", key, rows)
    assert compare(tmp_path, "-q") == 0
    found = diagnose(tmp_path)
    item = next(i for i in found["gate"] if i["item"] == "recorded alike")
    assert "old_log_probs: 1 row on the benchmark only" in item["evidence"]
    assert found["verdict"] == "aligned"


@pytest.mark.parametrize(
    ("key", "state"), [("token_level_rewards", "shut"), ("advantages", "caveat")]
)
def test_what_a_stage_is_given_is_seen_by_the_gate(tmp_path: Path, key: str, state: str) -> None:
    update = stages.ACTOR_UPDATE
    for name, rows in (("b", LOG_PROBS), ("t", changed((0, 1), -2.5))):
        side(tmp_path / name, {"loss_mask": np.ones((2, 3)), key: rows}, stage=update)
    assert compare(tmp_path, "-q") == 0
    found = diagnose(tmp_path)
    item = {"token_level_rewards": "rewards"}.get(key, key)
    assert states(found)[item] == state, found["gate"]
    assert "differ by" in next(i for i in found["gate"] if i["item"] == item)["evidence"]
    assert judged(tmp_path, key, update)["unjudged_because"] == reasons.GIVEN


def broken(tmp: Path) -> None:
    next((tmp / "t/data/old_log_probs").rglob("*.npy")).write_bytes(b"no array")


def gone(tmp: Path) -> None:
    shutil.rmtree(tmp / "t")


def alone(tmp: Path) -> None:
    shutil.rmtree(tmp / "t/data/old_log_probs")


@pytest.mark.parametrize(
    ("harm", "because"),
    [(broken, reasons.UNREADABLE), (gone, reasons.UNREADABLE), (alone, reasons.NO_PARTNER)],
)
def test_what_cannot_be_read_is_unjudged(
    tmp_path: Path, harm: Callable[[Path], None], because: str
) -> None:
    for name in "bt":
        side(tmp_path / name, {"old_log_probs": LOG_PROBS})
    assert compare(tmp_path, "-q") == 0
    harm(tmp_path)
    found = diagnose(tmp_path)
    assert judged(tmp_path, "old_log_probs")["unjudged_because"] == because
    item = next(i for i in found["gate"] if i["item"] == "recorded alike")
    assert "old_log_probs" in item["evidence"]


def test_later_steps_are_listed(tmp_path: Path) -> None:
    for name in "bt":
        for step in (0, 1):
            side(tmp_path / name, {"old_log_probs": LOG_PROBS}, step=step)
    assert compare(tmp_path, "-q") == 0
    later = diagnose(tmp_path)["extent"][STAGE]["1"]["unjudged"]
    assert later[reasons.LATER_STEP] == 14 + 3  # records, and key data


def test_the_step_that_was_asked_for_is_the_one_that_is_judged(tmp_path: Path) -> None:
    side(tmp_path / "b", {"old_log_probs": LOG_PROBS})
    side(tmp_path / "t", {"old_log_probs": changed((1, 2), -6.5)}, step=3)
    assert compare(tmp_path, "-q", "--map-step", "0:3") == 0
    found = diagnose(tmp_path)
    assert found["verdict"] == "diverged" and found["first"]["operator"] == "old_log_probs"


#: Records of a stage of which none says how deep the model is: ids, gradients, a scalar, none.
NO_FORWARD: dict[str, dict[str, Any]] = {
    "ids": {
        "Module.model.embed.Embedding.forward.0": call(
            [tensor((9, 0, None, None), (4,), "torch.int64")], []
        )
    },
    "gradients": {"Module.model.a.Linear.backward.0": {"input": [tensor()], "output": [tensor()]}},
    "scalar": {"Torch.f.0.forward": call([scalar(0.5)], [])},
    "nothing": {},
}


@pytest.mark.parametrize("records", NO_FORWARD)
def test_without_forward_records_of_floats_nothing_bounds_a_result(
    tmp_path: Path, records: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, values in (("b", LOG_PROBS), ("t", changed((0, 1), -2.002))):
        side(tmp_path / name, {"old_log_probs": values, "entropys": LOG_PROBS})
        shutil.rmtree(tmp_path / name / STAGE)
        if NO_FORWARD[records]:
            dumps.write(tmp_path / name / STAGE / "step0/rank0", NO_FORWARD[records])
    assert compare(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "First to part" not in printed
    assert "old_log_probs: differs by 0.00021 (relative L2), not judged" in printed
    found = diagnose(tmp_path)
    assert found["verdict"] != "diverged", found["sentence"]
    assert judged(tmp_path, "old_log_probs")["unjudged_because"] == reasons.NO_FLOOR
    item = next(i for i in found["gate"] if i["item"] == "recorded alike")
    assert "old_log_probs" in item["evidence"] and "differs by 0.00021" in item["evidence"]
    assert main(["report", str(tmp_path / "out")]) == 0


def test_what_is_not_finite_on_one_side_needs_no_floor(tmp_path: Path) -> None:
    for name, values in (("b", LOG_PROBS), ("t", changed((0, 1), np.nan))):
        side(tmp_path / name, {"old_log_probs": values})
        dumps.write(tmp_path / name / STAGE / "step0/rank0", NO_FORWARD["ids"])
    assert compare(tmp_path, "-q") == 0
    found = diagnose(tmp_path)
    assert found["verdict"] == "diverged" and found["first"]["operator"] == "old_log_probs"


@pytest.mark.parametrize(("off", "verdict"), [(1e-7, "aligned"), (1e-3, "diverged")])
def test_results_of_records_equal_to_the_last_bit_may_be_rounded(
    tmp_path: Path, off: float, verdict: str
) -> None:
    """A logarithm of the same logits is another kernel's on the other side."""
    for name, factor in (("b", 1.0), ("t", 1 + off)):
        values = (np.asarray(LOG_PROBS) * factor).tolist()
        side(tmp_path / name, {"old_log_probs": values})
        path = next((tmp_path / name).rglob("dump.json"))
        text = path.read_text().replace('"Norm"', '"md5": "0a0b0c0d", "Norm"')
        path.write_text(text)
    assert compare(tmp_path, "-q") == 0
    assert diagnose(tmp_path)["verdict"] == verdict


def test_key_data_of_a_stage_without_records_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The update was dumped, and key data of the log-prob stage were saved beside it."""
    for name, values in (("b", LOG_PROBS), ("t", changed((1, 0), np.nan))):
        side(tmp_path / name, {"old_log_probs": values}, stage=stages.ACTOR_UPDATE)
    assert compare(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "old_log_probs: finite on one side only at 1 of 6 values, not judged" in printed
    found = diagnose(tmp_path)
    assert found["verdict"] == "aligned", found["sentence"]
    item = next(i for i in found["gate"] if i["item"] == "recorded alike")
    assert "old_log_probs" in item["evidence"] and "one side only" in item["evidence"]
    assert set(found["extent"]) == {STAGE, stages.ACTOR_UPDATE}


def test_key_data_alone_are_compared(tmp_path: Path) -> None:
    for name in "bt":
        for key, rows in (("prompts", PROMPTS), ("responses", RESPONSES)):
            save(tmp_path / name, key, rows)
        save(tmp_path / name, "old_log_probs", np.asarray(LOG_PROBS, np.float32))
    assert compare(tmp_path, "-q") == 0
    table = pl.read_parquet(tmp_path / f"out/{STAGE}/key_data.parquet")
    assert table["identical"].all() and table.height == 6
    found = diagnose(tmp_path)
    assert states(found)["tokens"] != "shut"
    assert judged(tmp_path, "old_log_probs")["unjudged_because"] == reasons.NO_FLOOR


def test_key_data_on_one_side_alone_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side(tmp_path / "b", {"old_log_probs": LOG_PROBS})
    dumps.write(tmp_path / "t" / STAGE / "step0/rank0", model())
    assert compare(tmp_path) == 0
    assert "key data are on the benchmark only, and were not compared" in capsys.readouterr().out


def test_runs_compared_by_hand_are_judged_alike(align: Align, tmp_path: Path) -> None:
    wrong = Device(split=True, faults={"entropies": lambda values: values * 1.3}, stage=STAGE)
    results = Results.open(align(wrong, repeat=False).results)
    runs = [results.store / "runs" / results.plan.runs[r].key for r in (BENCHMARK, TARGET)]
    assert main(["compare", *map(str, runs), "-o", str(tmp_path / "out"), "-q"]) == 0
    found = diagnose(tmp_path)
    assert found["verdict"] == "diverged" and found["first"]["operator"] == "entropys"
