"""Is determinism one table, applied once, and recorded?"""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlprobe.capture import determinism
from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process to which nothing has been applied, and which is put back afterwards."""
    monkeypatch.setattr(determinism, "_applied", None)
    for table in determinism.TABLE.values():
        for name in table.variables:
            monkeypatch.delenv(name, raising=False)
    was = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(was)


def session(seed: int = 7, deterministic: bool = True) -> Session:
    return Session("benchmark", "verl", "/d", "/s", deterministic=deterministic, seed=seed)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_variable_has_its_reason(device: str) -> None:
    table = determinism.table(device)
    assert set(table.variables) == set(table.reasons)
    assert determinism.environment(device) == dict(table.variables)
    assert all(isinstance(value, str) for value in table.variables.values())


def test_the_documentation_has_the_same_table(root: Path) -> None:
    text = (root / "docs/capture.md").read_text(encoding="utf-8")
    for device, table in determinism.TABLE.items():
        for name, value in table.variables.items():
            assert f"| {device} | `{name}={value}` |" in text, f"{device} {name} is not documented"


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu, cuda, npu"):
        determinism.environment("tpu")


def test_the_table_is_read_without_torch(root: Path) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None, msprobe=None)\n"
        "from rlprobe.capture.determinism import environment\n"
        "print(environment('npu')['HCCL_DETERMINISTIC'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "true"


def test_nothing_happens_where_it_is_not_asked_for(clean: None) -> None:
    assert determinism.apply(session(deterministic=False)) == {"deterministic": False}
    assert "MKL_DYNAMIC" not in os.environ


@pytest.mark.slow
@pytest.mark.msprobe
def test_seeds_and_switches_are_msprobes_and_applied_once(clean: None) -> None:
    pytest.importorskip("msprobe")
    done = determinism.apply(session())
    first = (random.random(), np.random.rand(), torch.rand(1).item())
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["MKL_DYNAMIC"] == "FALSE"
    assert os.environ["PYTHONHASHSEED"] == determinism.environment("cpu")["PYTHONHASHSEED"]
    assert done["deterministic"] is True and done["seed"] == 7
    assert "MKL_DYNAMIC" in done["late"], "set in the process, not before it: must be recorded"
    again = determinism.apply(session())
    assert again == done == determinism.applied()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) != first, "seeded twice"
    determinism.apply(dataclasses.replace(session(), seed=8))
    determinism.apply(session())
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
