"""Does the light engine keep the tensors of the chosen modules, and only those?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.unit.capture_helpers import UPDATE, dump, make, rank_dir, recorder, tokens  # noqa: E402

MODULES = ("layers.1.up", "layers.1")


def loss_of(model: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten())


def captured(root: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Two micro-batches with tensors; the model, and dump.json's data."""
    model = make()
    chosen = recorder(root, tensors=True, modules=MODULES, **options)
    with chosen.stage(UPDATE, 0, 1, model) as scope:
        for index in range(2):
            scope.micro_step(index)
            loss_of(model).backward()
    return model, dump(root)


def leaves(nest: Any) -> list[dict[str, Any]]:
    if isinstance(nest, dict):
        if "dtype" in nest:
            return [nest]
        return [leaf for item in nest.values() for leaf in leaves(item)]
    return [leaf for item in nest for leaf in leaves(item)] if isinstance(nest, list) else []


def test_every_tensor_is_what_its_statistics_are_of(tmp_path: Path) -> None:
    _, data = captured(tmp_path)
    directory = rank_dir(tmp_path) / "dump_tensor_data"
    every = [leaf for leaf in leaves(data) if leaf["Norm"] is not None]
    assert len(every) > 10
    names = [leaf["data_name"] for leaf in every]
    assert len(set(names)) == len(names)
    assert {path.name for path in directory.iterdir()} == set(names)
    for leaf in every:
        tensor = torch.load(directory / leaf["data_name"], weights_only=True)
        assert list(tensor.shape) == leaf["shape"]
        assert float(tensor.norm()) == pytest.approx(leaf["Norm"], rel=1e-6)
        assert float(tensor.max()) == leaf["Max"]
    assert "Module.layers.1.up.Linear.forward.0.output.0.pt" in names
    assert "Module.layers.1.up.Linear.forward.1.input.0.pt" in names
    assert all(name.startswith(("Module.layers.1.up.", "Module.layers.1.Block.")) for name in names)


def test_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain = make()
    for _ in range(2):
        loss_of(plain).backward()
    watched, _ = captured(tmp_path)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_only_the_micro_batches_asked_for(tmp_path: Path) -> None:
    _, data = captured(tmp_path, micro_steps=(1,))
    kept = {name for name, entry in data.items() if any("data_name" in x for x in leaves(entry))}
    assert kept and all(name.endswith(".1") for name in kept)
    assert {name.rsplit(".", 1)[1] for name in data} == {"0", "1"}


def test_what_no_longer_fits_keeps_its_statistics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    budget = 4096
    with caplog.at_level("WARNING", logger="rlprobe"):
        _, data = captured(tmp_path, tensor_budget=budget)
    files = list((rank_dir(tmp_path) / "dump_tensor_data").iterdir())
    sizes = [torch.load(file, weights_only=True).nbytes for file in files]
    assert 0 < sum(sizes) <= budget
    every = [leaf for leaf in leaves(data) if leaf["Norm"] is not None]
    without = [leaf for leaf in every if "data_name" not in leaf]
    assert without and len(without) + len(files) == len(every)
    assert f"{len(files)} tensors kept, {len(without)} left out" in caplog.text
