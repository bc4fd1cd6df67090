"""Is what an earlier rlprobe made still read, and what a newer one made refused by that name?

``tests/unit/formats`` has a store, a results directory and a bundle of every released format.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.dumps import records
from rlprobe.errors import RlprobeError, StoreError
from rlprobe.formats import mark
from rlprobe.store import alignments
from rlprobe.store.exporting import export
from rlprobe.store.importing import import_bundle
from rlprobe.store.listing import listed
from rlprobe.store.read import Run, keys
from rlprobe.store.repair import repair
from rlprobe.store.verify import verify

FORMATS = Path(__file__).parents[1] / "formats"
RELEASED = sorted(path.name.removesuffix(".tar.xz") for path in FORMATS.glob("*.tar.xz"))


@pytest.fixture(params=RELEASED)
def released(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The directory in which that version worked."""
    with tarfile.open(FORMATS / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_one_of_every_release() -> None:
    assert "0.1.0" in RELEASED


def test_its_store_is_whole_and_all_of_its_runs_are_read(released: Path) -> None:
    store = released / "store"
    assert verify(store).problems == []
    assert len(keys(store)) == 3
    for key in keys(store):
        run = Run.open(store, key)
        assert run.metrics()[0]["metrics"] == {"actor/loss": 0.5}
        assert run.weights() is not None and run.environment()
        for stage, state in run.manifest.stages.items():
            if state.state == "captured":
                assert records.read(run.records(stage)).height == state.records
    assert len(alignments.alignments(store)["a"]) == 3
    assert repair(store).now.unchecked == []


def test_its_bundle_is_imported_and_exported_again_to_the_same_bytes(released: Path) -> None:
    bundle = released / "runs.rlprobe"
    done = import_bundle(released / "other", bundle)
    assert done.new_runs == 3
    export(released / "other", done.keys, released / "again")
    assert (released / "again").read_bytes() == bundle.read_bytes()


def test_its_results_are_judged_as_they_were(released: Path) -> None:
    said = json.loads((released / "results/a/diagnosis.json").read_text())
    assert main(["diagnose", "results/a"]) == 0
    again = json.loads((released / "results/a/diagnosis.json").read_text())
    assert (again["verdict"], again["first"]) == (said["verdict"], said["first"])
    assert main(["report", "results/a"]) == 0


def newer_json(path: Path) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "format": 99}))


def newer_line(path: Path) -> None:
    rest = path.read_text().splitlines()[1:]
    path.write_text("\n".join([json.dumps({"format": 99}), *rest]))


def newer_table(path: Path) -> None:
    frame = pl.read_parquet(path)
    kind = path.parent.name if path.parent.name == "records" else path.stem
    frame.write_parquet(path, metadata=mark(kind, 99))


NEWER: dict[str, tuple[Callable[[Path], None], Callable[[Run], Any]]] = {
    "metrics.jsonl": (newer_line, lambda run: run.metrics()),
    "environment.json": (newer_json, lambda run: run.environment()),
    "mock_proof.json": (newer_json, lambda run: run.mock_proof()),
    "weights.parquet": (newer_table, lambda run: run.weights()),
    "records/actor_update.parquet": (
        newer_table,
        lambda run: records.read(run.records("actor_update")),
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_a_run_s_file_of_a_newer_rlprobe_is_refused_by_that_name(
    committed: Callable[..., Run], name: str
) -> None:
    run = committed()
    make, read = NEWER[name]
    path = run.path / name
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    make(path)
    _list_again(run, name)
    with pytest.raises(RlprobeError, match="was made by a newer rlprobe: its format is 99"):
        read(Run.open(run.store, run.key))


def _list_again(run: Run, name: str) -> None:
    """The manifest as the newer rlprobe would have written it."""
    path = run.path / "manifest.json"
    old, data = listed(run.path)[name], (run.path / name).read_bytes()
    text = path.read_text().replace(old.sha256, hashlib.sha256(data).hexdigest())
    value = json.loads(text)
    next(file for file in value["files"] if file["path"] == name)["size"] = len(data)
    path.write_text(json.dumps(value))
    for copy in (run.store / "manifests" / run.key).iterdir():
        copy.unlink()


def test_a_newer_manifest_record_and_bundle_are_refused_by_that_name(
    committed: Callable[..., Run], store: Path, tmp_path: Path
) -> None:
    run = committed()
    path = alignments.record_alignment(store, "cpu", [run.key])
    newer_json(path)
    with pytest.raises(StoreError, match=r"cpu\.json was made by a newer rlprobe"):
        alignments.alignments(store)
    for copy in (store / "manifests" / run.key).iterdir():
        copy.unlink()
    newer_json(run.path / "manifest.json")
    with pytest.raises(StoreError, match=r"manifest\.json was made by a newer rlprobe"):
        Run.open(store, run.key)


def test_every_table_of_a_run_says_what_it_is(committed: Callable[..., Run]) -> None:
    run = committed()
    tables = [name for name in listed(run.path) if name.endswith(".parquet")]
    assert len(tables) == 4
    for name in tables:
        said = json.loads(pl.read_parquet_metadata(run.path / name)["rlprobe"])
        assert said == {"table": name.partition("/")[0].removesuffix(".parquet"), "format": 1}
