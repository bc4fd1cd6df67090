"""Is determinism one table, applied once, and recorded?"""

from __future__ import annotations

import dataclasses
import enum
import os
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlprobe.capture import determinism
from rlprobe.capture.session import Session
from rlprobe.errors import ConfigError

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


_REDUCTIONS = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process to which nothing has been applied, and which is put back afterwards."""
    monkeypatch.setattr(determinism, "_applied", None)
    for table in determinism.TABLE.values():
        for variable in table.variables:
            monkeypatch.delenv(variable.name, raising=False)
    was = torch.are_deterministic_algorithms_enabled()
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    kept = [(cuda, name, getattr(cuda, name)) for name in _REDUCTIONS]
    kept.append((cudnn, "allow_tf32", cudnn.allow_tf32))
    yield
    torch.use_deterministic_algorithms(was)
    for owner, name, value in kept:
        setattr(owner, name, value)


def session(seed: int = 7, deterministic: bool = True) -> Session:
    return Session("benchmark", "verl", "/d", "/s", deterministic=deterministic, seed=seed)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_every_variable_has_its_reason(device: str) -> None:
    table = determinism.table(device)
    names = [variable.name for variable in table.variables]
    assert len(set(names)) == len(names)
    assert list(determinism.environment(device)) == names
    assert all(variable.why for variable in table.variables)
    assert all(switch.why for switch in table.switches)


def test_the_documentation_has_the_same_table(root: Path) -> None:
    text = (root / "docs/capture.md").read_text(encoding="utf-8")
    for device, table in determinism.TABLE.items():
        rows = [(f"{v.name}={v.value}", v.why) for v in table.variables]
        rows += [(switch.shown, switch.why) for switch in table.switches]
        for shown, why in rows:
            assert f"| {device} | `{shown}` | {why} |" in text, f"{device} {shown}"


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
    assert done.stdout.strip() == "strict"


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


@pytest.mark.msprobe
def test_full_precision_is_switched_on_and_read_back(clean: None) -> None:
    pytest.importorskip("msprobe")
    torch.backends.cudnn.allow_tf32 = True
    done = determinism.apply(session())
    assert done["switches"]["backends.cudnn.allow_tf32"] is False is torch.backends.cudnn.allow_tf32
    assert done["switches"]["set_float32_matmul_precision"] == "highest"
    assert done["absent"] == []


@pytest.mark.msprobe
def test_a_switch_that_is_not_there_is_said_and_no_error(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch without torch_npu has no torch.npu."""
    pytest.importorskip("msprobe")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    done = determinism.apply(dataclasses.replace(session(), device="npu"))
    assert "npu.conv.allow_hf32" in done["absent"]
    assert "npu.conv.allow_hf32" not in done["switches"]


def test_a_name_that_an_older_version_takes_and_forgets_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch_npu's settings answer None to any name; without the enumeration nothing is set."""

    class Forgets:
        def __getattr__(self, name: str) -> None:
            return None

    npu = types.SimpleNamespace(matmul=Forgets())
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    rows = determinism.table("npu").switches
    (row,) = [s for s in rows if s.member_of is not None]
    assert determinism._switched((row,)) == ({}, [row.path])
    kinds = enum.IntEnum("kinds", {"KEEP_DTYPE": 0, "USE_HF32": 3})
    npu.CubeMathType = kinds
    npu.matmul = types.SimpleNamespace(cube_math_type=kinds.USE_HF32)
    assert determinism._switched((row,)) == ({row.path: "KEEP_DTYPE"}, [])
    assert npu.matmul.cube_math_type == 0


@pytest.mark.msprobe
def test_what_the_user_set_otherwise_stands_and_is_recorded(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("msprobe")
    monkeypatch.setenv("HCCL_DETERMINISTIC", "true")
    done = determinism.apply(dataclasses.replace(session(), device="npu"))
    assert os.environ["HCCL_DETERMINISTIC"] == "true"
    assert done["overruled"] == {"HCCL_DETERMINISTIC": "true"}
