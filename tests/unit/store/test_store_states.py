"""States that a benchmark keeps for its replays: parts of its run, like any other file of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rlprobe.cli import main
from rlprobe.errors import StoreError
from rlprobe.store import listing
from rlprobe.store.commit import commit
from rlprobe.store.exporting import export
from rlprobe.store.importing import import_bundle
from rlprobe.store.keys import run_key
from rlprobe.store.read import Run
from rlprobe.store.verify import verify

HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
TENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(4)


def keep(scratch: Path, *steps: int, tensors: bytes = TENSORS) -> Path:
    for step in steps:
        directory = scratch / "side/states" / f"step{step}"
        directory.mkdir(parents=True)
        (directory / "actor-rank0-000.safetensors").write_bytes(tensors)
        (directory / "actor-rank0.json").write_text(json.dumps({"step": step}))
    return scratch


def test_they_are_in_the_run_and_travel_with_it(
    scratch: Callable[..., Path], committed: Callable[..., Run], store: Path, tmp_path: Path
) -> None:
    run = committed(scratch_at=keep(scratch(steps=3), 1, 2))
    assert sorted(run.states) == [1, 2]
    assert not run.is_joined, "it kept states, and went its own way"
    names = {path.name for path in run.states[2].iterdir()}
    assert names == {"actor-rank0-000.safetensors", "actor-rank0.json"}
    # equal content is kept once
    assert len({file.sha256 for file in run.manifest.files if "safetensors" in file.path}) == 1
    bundle = export(store, [run.key], tmp_path / "a.rlprobe")
    other = tmp_path / "other"
    import_bundle(other, bundle.path)
    again = Run.open(other, run.key)
    assert sorted(again.states) == [1, 2]
    assert (again.states[1] / "actor-rank0-000.safetensors").read_bytes() == TENSORS
    assert verify(other).problems == []


def test_a_state_that_was_changed_is_not_loaded(
    scratch: Callable[..., Path], committed: Callable[..., Run]
) -> None:
    run = committed(scratch_at=keep(scratch(), 1))
    assert listing.checked_below(run.path, "states/step1") == run.states[1]
    path = run.states[1] / "actor-rank0-000.safetensors"
    path.unlink()
    path.write_bytes(TENSORS[:-1] + b"\x01")
    with pytest.raises(StoreError, match="is not what was committed"):
        listing.checked_below(run.path, "states/step1")


@pytest.mark.parametrize(
    "tensors",
    [b"\x80\x04cos\nsystem\n.", b"", TENSORS[:20], (1 << 40).to_bytes(8, "little") + HEADER],
    ids=["a pickle", "nothing", "cut short", "longer than it is"],
)
def test_what_is_no_safetensors_is_not_committed(
    scratch: Callable[..., Path], store: Path, tensors: bytes
) -> None:
    declared = {"role": "benchmark"}
    with pytest.raises(StoreError, match=r"is not the \.safetensors file"):
        commit(keep(scratch(), 1, tensors=tensors), store, run_key(declared), declared)
    assert not (store / "runs").exists() or not list((store / "runs").iterdir())


def test_what_was_loaded_is_read_back_by_process_and_step(
    scratch: Callable[..., Path], committed: Callable[..., Run]
) -> None:
    place = scratch()
    for name, steps in (("actor-rank1", (2, 1)), ("actor-rank0", (1,))):
        path = place / "side/parts/joined" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"step": s, "rounded": []}) + "\n" for s in steps))
    run = committed("target", declared={"rejoin": True, "replay_of": "0" * 64}, scratch_at=place)
    assert run.is_joined
    found = [(line["role"], line["rank"], line["step"]) for line in run.joined()]
    assert found == [("actor", 0, 1), ("actor", 1, 1), ("actor", 1, 2)]


@pytest.mark.parametrize(("kept", "code"), [((), 1), ((1,), 1), ((1, 2), 0)])
def test_an_imported_benchmark_without_states_is_told_before_anything_runs(
    scratch: Callable[..., Path],
    committed: Callable[..., Run],
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kept: tuple[int, ...],
    code: int,
) -> None:
    run = committed(scratch_at=keep(scratch(steps=3), *kept))
    path = tmp_path / "a.yaml"
    raw = {
        "name": "a",
        "framework": "verl",
        "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"},
        "data": {"train_files": "builtin:arithmetic"},
        "overrides": ["algorithm.adv_estimator=grpo"],
        "steps": {"total": 3, "start": 0, "end": 2},
        "benchmark": {"run": run.key},
        "controls": {"rejoin": True},
        "store": str(store),
    }
    path.write_text(yaml.safe_dump(raw))
    assert main(["config", "check", str(path)]) == code
    said = capsys.readouterr().err
    assert ("which was collected without: collect it again" in said) == bool(code)
    path.write_text(yaml.safe_dump({**raw, "controls": {}}))
    assert main(["config", "check", str(path)]) == 0
