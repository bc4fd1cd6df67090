"""From start to commit: what happens when a run fails, is killed, or is there already?

The framework here is a small script in verl's place, so that each way of failing takes no minute;
real verl is run in tests/e2e.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlprobe import frameworks, stages
from rlprobe.claims import Holder
from rlprobe.cli import main
from rlprobe.config import Alignment
from rlprobe.errors import DumpError, HookError, RunError, StoreError
from rlprobe.files import InUseError
from rlprobe.frameworks import RunDirectories
from rlprobe.frameworks.layout import Layout
from rlprobe.runs import devices
from rlprobe.runs import launch as launching
from rlprobe.runs.plan import plan
from rlprobe.spec import RunSpec
from rlprobe.store.verify import verify

pytestmark = pytest.mark.slow

#: Leaves what a captured stage leaves, and counts how often it was run.
_TRAIN = """
import json, os, pathlib, sys
session = json.load(open(os.environ["RLPROBE_CONFIG"]))
side = pathlib.Path(session["side"])
with open(sys.argv[1], "a") as count:
    count.write("x")
for stage in session["expected_stages"]:
    place = pathlib.Path(session["dump"], stage, "step0", "rank0")
    place.mkdir(parents=True)
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": 1.0,
            "Min": 0.0, "Mean": 0.5, "Norm": 1.0, "requires_grad": False}
    entry = {"input_args": [leaf], "input_kwargs": {}, "output": [leaf]}
    dump = {"task": "statistics", "level": "L0", "framework": "pytorch", "dump_data_dir": None,
            "data": {"Module.lm_head.Linear.forward.0": entry}}
    (place / "dump.json").write_text(json.dumps(dump))
    (place / "stack.json").write_text("{}")
    (place / "construct.json").write_text("{}")
parts = side / "parts" / "captured"
parts.mkdir(parents=True)
with open(parts / "actor-rank0.jsonl", "w") as file:
    for stage in session["expected_stages"]:
        file.write(json.dumps({"step": 0, "trainer_step": 1, "stage": stage, "rank": 0,
                               "role": "actor", "engine": "light", "records": 2, "calls": 1,
                               "seconds": 0.1, "adapter": None}) + "\\n")
"""


@dataclasses.dataclass(frozen=True)
class _Framework:
    script: Path
    count: Path
    name: str = "verl"
    builtin_version: int = 1
    builtins: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=lambda: {"model": ("tiny-qwen2",), "data": ("arithmetic",)}
    )

    def check(self, spec: RunSpec) -> None:
        """It can do everything."""

    def checkpoint_step(self, path: str) -> int:
        return 0

    def inference_not_recorded(self, spec: RunSpec) -> None:
        return None

    def layout(self, spec: RunSpec) -> Layout:
        return Layout("alone", spec.world_size)

    def expected_stages(self, spec: RunSpec) -> tuple[str, ...]:
        return (stages.LOG_PROB,)

    def prepare(self, spec: RunSpec, directories: RunDirectories) -> list[list[str]]:
        return []

    def command(self, spec: RunSpec, directories: RunDirectories) -> list[str]:
        return ["python", str(self.script), str(self.count)]

    def environment(self, spec: RunSpec, directories: RunDirectories) -> dict[str, str]:
        return {}


@dataclasses.dataclass
class Bench:
    """A benchmark run whose framework is the script."""

    spec: RunSpec
    store: Path
    script: Path
    count: Path

    @property
    def started(self) -> int:
        return len(self.count.read_text()) if self.count.exists() else 0

    def launch(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(launching.launch(self.spec, self.store).read_text())
        return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    script, count = tmp_path / "train.py", tmp_path / "count"
    script.write_text(_TRAIN)
    framework = _Framework(script, count)
    monkeypatch.setattr(frameworks, "get", lambda name: framework)
    raw = {
        "name": "t",
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"},
        "data": {"train_files": "builtin:arithmetic"},
    }
    runs = plan(Alignment.model_validate_json(json.dumps(raw)), {})
    return Bench(runs["benchmark"], tmp_path / "store", script, count)


def test_a_run_is_committed_under_its_key_and_its_scratch_is_gone(bench: Bench) -> None:
    manifest = bench.launch()
    assert manifest["key"] == bench.spec.key
    assert manifest["stages"][stages.LOG_PROB]["records"] == 2
    assert list((bench.store / "scratch").iterdir()) == []


def test_a_run_in_the_store_is_not_started_again(bench: Bench) -> None:
    bench.launch()
    bench.launch()
    assert bench.started == 1


def test_rlprobes_own_error_is_what_the_user_reads(bench: Bench) -> None:
    said = "rlprobe.errors.ReplayError: the prompts differ (rows 1)"
    bench.script.write_text(f"print('noise'); print({said!r}); print('more'); raise SystemExit(1)")
    with pytest.raises(RunError) as caught:
        bench.launch()
    assert str(caught.value).startswith("benchmark: the prompts differ (rows 1)\n(log: ")


def test_another_failure_shows_the_end_of_the_log(bench: Bench) -> None:
    bench.script.write_text("for i in range(99): print('line', i)\nraise SystemExit(5)\n")
    with pytest.raises(RunError, match="exit status 5 starting") as caught:
        bench.launch()
    assert "line 98" in str(caught.value)
    assert "line 10\n" not in str(caught.value)


def test_a_run_that_captured_nothing_is_no_success(bench: Bench) -> None:
    bench.script.write_text("pass\n")
    with pytest.raises(HookError, match=stages.LOG_PROB):
        bench.launch()
    assert not list(bench.store.glob("runs/*"))


@pytest.mark.parametrize(
    ("written", "instead", "said"),
    [
        ('{"Module.lm_head.Linear.forward.0": entry}', "{}", "not one record"),
        ('"construct.json"', '"construct.json.partial"', "capture failed while it wrote"),
        ("place.mkdir(parents=True)\n", "continue\n", "is empty: nothing was captured"),
    ],
    ids=["no records", "half a file", "no files"],
)
def test_what_never_makes_a_run_is_no_success_and_does_not_stand_in_the_way(
    bench: Bench, written: str, instead: str, said: str
) -> None:
    assert written in _TRAIN
    bench.script.write_text(_TRAIN.replace(written, instead))
    with pytest.raises(StoreError, match=rf"(?s)({said}).*log: .*which runs again\)"):
        bench.launch()
    assert not list(bench.store.glob("runs/*/manifest.json"))
    bench.script.write_text(_TRAIN)
    assert bench.launch()["key"] == bench.spec.key
    assert bench.started == 2


def test_what_another_rlprobe_may_read_is_kept_and_both_ways_on_are_said(bench: Bench) -> None:
    bench.script.write_text(_TRAIN.replace('(place / "dump.json").write_text', "str"))
    for _ in range(2):
        with pytest.raises(DumpError, match=r"(?s)neither dump.json .*`rlprobe run --force --role"):
            bench.launch()
    assert bench.started == 1


def test_what_a_failed_commit_left_is_committed_without_running_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(launching, "commit", refuse)
        with pytest.raises(StoreError, match=r"disk is full\n\(the run's output is kept in ") as e:
            bench.launch()
    assert "`rlprobe run --force --role benchmark --store " in str(e.value)
    assert bench.launch()["key"] == bench.spec.key
    assert bench.started == 1


def test_what_a_killed_run_left_is_not_taken_for_its_end(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    left = bench.store / "scratch" / f"{bench.spec.key[:16]}-1"
    (left / "dump" / stages.LOG_PROB / "step0").mkdir(parents=True)
    (left / "side").mkdir()
    # it was killed outright: the store says that it is there
    assert main(["store", "ls", "--store", str(bench.store)]) == 0
    said = capsys.readouterr().err
    assert f"1 attempt in {left.parent}, under way or left by what failed or was killed" in said
    bench.launch()
    assert f"what an earlier attempt left goes first: {left}" in capsys.readouterr().err
    assert bench.started == 1
    assert not left.exists()
    main(["store", "ls", "--store", str(bench.store)])
    assert "attempt" not in capsys.readouterr().err


def test_where_a_failed_run_left_its_output_is_said_and_gc_removes_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.script.write_text("raise SystemExit(5)\n")
    with caplog.at_level("INFO"), pytest.raises(RunError, match="exit status 5"):
        bench.launch()
    (left,) = (bench.store / "scratch").iterdir()
    assert f"what it left stays in {left} until the next attempt, or `rlprobe store gc`" in (
        caplog.text
    )
    # also where no run was ever committed
    assert main(["store", "gc", "--store", str(bench.store)]) == 0
    assert not left.exists()


def test_a_replay_without_its_benchmark_says_what_to_do(bench: Bench) -> None:
    spec = dataclasses.replace(bench.spec, role="target", replay_of="0" * 64)
    with pytest.raises(StoreError, match="run the benchmark first"):
        launching.launch(spec, bench.store)
    assert bench.started == 0


def test_a_benchmark_that_kept_no_states_is_refused_with_what_to_run(bench: Bench) -> None:
    bench.launch()
    (bench.store / "runs" / bench.spec.key / "rollouts").mkdir()
    steps = bench.spec.steps.model_copy(update={"total": 3, "end": 2})
    spec = dataclasses.replace(
        bench.spec, role="target", replay_of=bench.spec.key, rejoin=True, steps=steps
    )
    with pytest.raises(StoreError, match=r"step 1, 2 .* collect it again with controls.rejoin"):
        launching.launch(spec, bench.store)
    assert bench.started == 1


@pytest.mark.parametrize(
    "change",
    [
        {"role": "target", "replay_of": "0" * 64},
        {"role": "repeat", "replay_of": "0" * 64, "rejoin": True},
        {"imported": "1" * 64},
        {"device": "npu", "world_size": 64},
        {"device": "cuda", "world_size": 64},
    ],
)
def test_what_can_only_fail_is_refused_before_there_is_a_store(
    bench: Bench, change: dict[str, Any]
) -> None:
    with pytest.raises((RunError, StoreError)):
        launching.require(dataclasses.replace(bench.spec, **change), bench.store)
    assert not bench.store.exists()


def test_what_is_in_the_store_or_only_to_be_committed_needs_no_device(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.launch()

    def none_here(kind: str, count: int) -> None:
        raise RunError("no device")

    monkeypatch.setattr(devices, "require", none_here)
    launching.require(bench.spec, bench.store)
    with pytest.raises(RunError, match="no device"):
        launching.require(bench.spec, bench.store, force=True)
    left = bench.store / "scratch" / f"{bench.spec.key[:16]}-1" / "side"
    left.mkdir(parents=True)
    shutil.rmtree(bench.store / "runs" / bench.spec.key)
    with pytest.raises(RunError, match="no device"):
        launching.require(bench.spec, bench.store)
    (left / "run.json").write_text("{}")
    launching.require(bench.spec, bench.store)


def test_an_imported_run_that_is_not_there_says_what_to_do(bench: Bench) -> None:
    spec = dataclasses.replace(bench.spec, imported="1" * 64)
    with pytest.raises(StoreError, match="rlprobe store import"):
        launching.launch(spec, bench.store)


def test_the_script_of_a_run_can_be_run_by_hand(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def keep(scratch: Path, *args: Any) -> None:
        seen.append((scratch / "run.sh").read_text())
        raise StoreError("kept")

    monkeypatch.setattr(launching, "commit", keep)
    with pytest.raises(StoreError):
        bench.launch()
    assert seen[0].startswith("#!/bin/bash\n")
    assert f"export RLPROBE_CONFIG={bench.store}" in seen[0]
    assert str(bench.script) in seen[0]


def test_a_fault_is_looked_for_from_where_the_command_was_started(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = dataclasses.replace(bench.spec, fault="faults/a.py:b")
    session = launching.session_of(spec, bench.store, tmp_path)
    assert session.fault == f"{tmp_path}/faults/a.py:b"


def test_a_fault_in_the_callers_environment_is_not_planted_in_the_benchmark(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROBE_FAULT", "faults/a.py:b")
    seen = bench.store.parent / "seen"
    bench.script.write_text(
        f"import os\nopen({str(seen)!r}, 'w').write(os.environ['RLPROBE_FAULT'])\n{_TRAIN}"
    )
    bench.launch()
    assert seen.read_text() == ""


def test_a_run_is_made_again_when_it_is_forced(bench: Bench) -> None:
    first = bench.launch()
    assert bench.launch() == first and bench.count.read_text() == "x"
    path = launching.launch(bench.spec, bench.store, force=True)
    assert bench.count.read_text() == "xx"
    assert json.loads(path.read_text())["key"] == first["key"]
    assert verify(bench.store).problems == []


def test_a_run_that_was_imported_cannot_be_forced(bench: Bench) -> None:
    spec = dataclasses.replace(bench.spec, imported=bench.spec.key)
    with pytest.raises(StoreError, match="import --replace"):
        launching.launch(spec, bench.store, force=True)


def test_a_file_system_without_locks_lets_one_process_make_a_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("rlprobe.files.fcntl.flock", unsupported)
    holder = bench.store / "locks" / f"{bench.spec.key}.holder"
    holder.parent.mkdir(parents=True)
    elsewhere = Holder.me()._replace(host="another-host")
    holder.write_bytes(elsewhere.to_bytes())
    with pytest.raises(InUseError, match=f"process {elsewhere.pid} on another-host"):
        bench.launch()
    dead = Holder.me()._replace(began=1)
    holder.write_bytes(dead.to_bytes())
    assert bench.launch()["key"] == bench.spec.key
    assert not holder.exists()
