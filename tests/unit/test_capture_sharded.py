"""Under FSDP, alone and over two ranks: same names, right shards, and nothing changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rlprobe import sketch  # noqa: E402
from rlprobe.capture.weights import describe  # noqa: E402
from tests.unit.capture_helpers import UPDATE, Tiny, make  # noqa: E402

pytestmark = pytest.mark.slow

Run = Callable[[str, int], Path]
ORIGINAL = pytest.param("fsdp1-original", marks=pytest.mark.long)
KINDS = ["fsdp2", "fsdp1", ORIGINAL]


@pytest.fixture(scope="module")
def run(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    done: dict[tuple[str, int], Path] = {}

    def start(kind: str, world: int) -> Path:
        if (kind, world) not in done:
            directory = tmp_path_factory.mktemp(f"{kind}-{world}")
            script = Path(__file__).with_name("capture_sharded_run.py")
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(script), kind, str(rank), str(world), str(directory)],
                    env={**os.environ, "PYTHONPATH": str(root)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(world)
            ]
            said = [process.communicate()[0] for process in ranks]
            assert all(process.returncode == 0 for process in ranks), "\n".join(said)[-4000:]
            done[kind, world] = directory
        return done[kind, world]

    return start


def records(directory: Path, rank: int, name: str = "dump.json") -> dict[str, Any]:
    path = directory / "dump" / UPDATE / "step0" / f"rank{rank}" / name
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["data"]
    return data


def weights(directory: Path, rank: int) -> dict[str, dict[str, Any]]:
    path = directory / f"side/parts/weights/actor-rank{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}


@pytest.fixture(scope="module")
def whole() -> dict[str, dict[str, Any]]:
    """The same model, not sharded."""
    model = make(lambda: Tiny(width=22))
    return {record["name"]: record for record in describe([model], True)}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_unchanged_and_the_model_clean(kind: str, world: int, run: Run) -> None:
    for rank in range(world):
        seen = json.loads((run(kind, world) / f"seen{rank}.json").read_text())
        assert seen["different"] == []
        assert seen["hooks_left"] == []


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_modules_have_the_names_of_the_plain_model(kind: str, world: int, run: Run) -> None:
    data = records(run(kind, world), 0)
    for name in ("embed.Embedding", "layers.0.Block", "layers.1.up.Linear", "head.Linear"):
        for direction in ("forward", "backward"):
            for call in (0, 1):
                assert f"Module.{name}.{direction}.{call}" in data
    assert not any("FSDP" in name or "_fsdp" in name or "Fully" in name for name in data)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_measured_while_they_are_whole(
    kind: str, run: Run, whole: dict[str, dict[str, Any]]
) -> None:
    """At the second call the optimizer has stepped: other numbers, in the same storage."""
    data = records(run(kind, 2), 1)
    first, second = (
        data[f"Module.layers.1.up.Linear.forward.{call}"]["parameters"]["weight"] for call in (0, 1)
    )
    expected = whole["layers.1.up.weight"]
    assert first["shape"] == expected["shape"]
    assert first["Norm"] == pytest.approx(expected["norm"], rel=1e-6)
    assert second["Norm"] != first["Norm"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_fsdp1_has_the_records_of_fsdp2(kind: str, world: int, run: Run) -> None:
    """Parameters and their gradients too, which it keeps in views; no flat parameter is one."""
    for rank in range(world):
        expected, found = (records(run(of, world), rank) for of in ("fsdp2", kind))
        assert found.keys() == expected.keys()
        for name, record in expected.items():
            if ".forward." in name:
                assert found[name]["parameters"].keys() == record["parameters"].keys(), name
                for key, leaf in record["parameters"].items():
                    assert found[name]["parameters"][key]["Norm"] == pytest.approx(leaf["Norm"])
            elif ".parameters_grad." in name:
                assert found[name].keys() == record.keys(), name
                for key, (leaf,) in record.items():
                    assert found[name][key][0]["Norm"] == pytest.approx(leaf["Norm"], rel=1e-5)
                    assert found[name][key][0]["shape"] == leaf["shape"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_on_one_rank_are_whole(
    kind: str, run: Run, whole: dict[str, dict[str, Any]]
) -> None:
    found = weights(run(kind, 1), 0)
    assert found.keys() == whole.keys()
    for name, record in whole.items():
        assert found[name]["complete"] is True
        assert found[name]["digest"] == record["digest"], name


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_weights_add_up_to_the_whole(
    kind: str, run: Run, whole: dict[str, dict[str, Any]]
) -> None:
    parts = [weights(run(kind, 2), rank) for rank in (0, 1)]
    for name, record in whole.items():
        held = [part[name] for part in parts if name in part]
        assert all(part["shape"] == record["shape"] for part in held)
        count = sum(int(np.prod(part["local_shape"])) for part in held)
        assert count == int(np.prod(record["shape"])), name
        total = sum(np.array(part["sketch"]) for part in held if part["sketch"] is not None)
        assert np.allclose(total, record["sketch"], atol=1e-4), name
        norms = [part["norm"] for part in held if part["norm"] is not None]
        assert np.hypot.reduce(norms) == pytest.approx(record["norm"], rel=1e-5)
        if any(part["local_shape"] != record["shape"] for part in held):
            assert all(part["complete"] is False for part in held)
            assert all(part["offset"] is not None for part in held if part["norm"] is not None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["grad_reduced", "change"])
def test_shards_of_gradients_and_changes_add_up(kind: str, what: str, run: Run) -> None:
    single = records(run(kind, 1), 0, "debug.json")
    shards = [records(run(kind, 2), rank, "debug.json") for rank in (0, 1)]
    names = [name for name in single if f".{what}.0." in name]
    assert len(names) == 16
    for name in names:
        held = [shard[name] for shard in shards if name in shard]
        expected = sketch.decode(single[name]["Sketch"])
        total = sum(sketch.decode(leaf["Sketch"]) for leaf in held if "Sketch" in leaf)
        # Both ranks train on the same tokens: the mean of equal gradients is that gradient.
        assert np.allclose(total, expected, atol=1e-5 * (1 + abs(expected).max())), name
        assert held
        for leaf in held:  # FSDP1 may leave a small parameter whole on one rank
            whole = leaf["shape"] == single[name]["shape"]
            assert whole or leaf["GlobalShape"] == single[name]["shape"]
            assert not (whole and len(held) > 1 and "GlobalShape" not in leaf)
