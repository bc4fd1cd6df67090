"""torch_npu: what rlprobe calls of it is in each wheel, and works in the real one without a device.

The wheel is imported on libraries of empty functions in place of CANN's: torch's backend is there,
its settings and options are kept by its own C++ code, and no device is found. Nothing computes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.contract import published
from tests.contract.conftest import CONTRACT, RUN

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow]

#: Oldest torch that capture supports, one between, and newest.
VERSIONS = ("2.5.1", "2.7.1", "2.9.0", "2.14.0")
#: CANN's own functions among the names that torch_npu's library leaves open.
_CANN = re.compile(r"^(acl|Msprof|rt[A-Z])\w*$")
_LIBRARIES = ("ascendcl", "acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "hccl")
#: Recorded on every device, and not of the NPU's table.
_OTHER_DEVICES = {"cudnn_benchmark", "cudnn_deterministic", "default_dtype"}
_CONFIG, _MEMORY = "torch_npu/npu/npu_config.py", "torch_npu/npu/memory.py"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, root: Path) -> dict[str, str]:
    """Environment of a process that imports the real torch_npu of this torch's version."""
    place = tmp_path_factory.mktemp("npu")
    version = torch.__version__.partition("+")[0]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:",
         "-d", str(place), f"torch_npu=={version}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"torch_npu {version} cannot be had here: {done.stderr.strip()[-200:]}")
    if not shutil.which("cc") or not shutil.which("nm"):
        pytest.skip("no compiler for libraries in place of CANN's")
    (wheel,) = place.glob("torch_npu*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "site")
    _stand_in_for_cann(place / "site/torch_npu/lib", place / "lib")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("HCCL")},
        "LD_LIBRARY_PATH": str(place / "lib"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONPATH": os.pathsep.join([str(place / "site"), str(root)]),
    }


def _stand_in_for_cann(libraries: Path, out: Path) -> None:
    """Empty functions for every name of CANN's that torch_npu's libraries leave open."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *sorted(map(str, libraries.glob("*.so")))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = {line.split()[-1] for line in listed.stdout.splitlines() if line.strip()}
    # a message is text; everything else is a status of 0
    lines = [
        f'const char *{name}(void) {{ return ""; }}'
        if name.endswith("ErrMsg")
        else f"long {name}(void) {{ return 0; }}"
        for name in sorted(names)
        if _CANN.match(name)
    ]
    out.mkdir()
    for library in _LIBRARIES:
        source = out / f"{library}.c"
        own = lines if library == _LIBRARIES[0] else [f"int in_place_of_{library};"]
        source.write_text("\n".join(own) + "\n", encoding="utf-8")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", "-o", str(out / f"lib{library}.so"), str(source)],
            check=True,
        )


def _ask(environment: dict[str, str], code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", f"import json, torch, torch_npu\n{code}"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.cell("device", "torch_npu without a device: switches read back", RUN)
def test_the_npus_switches_are_set_and_read_back(environment: dict[str, str], root: Path) -> None:
    before, done, after, versions = _ask(
        environment,
        """
from rlprobe.capture import determinism, provenance
from rlprobe.capture.session import Session
before = provenance.switches()
done = determinism.apply(
    Session("target", "verl", "/d", "/s", deterministic=True, seed=7, device="npu")
)
print(json.dumps([before, done, provenance.switches(), provenance.versions()]))
""",
    )
    assert before["allow_hf32_conv"] is True, "on by default: what the table is for"
    assert done["absent"] == []
    assert done["switches"]["npu.conv.allow_hf32"] is False
    assert done["switches"]["npu.matmul.cube_math_type"] == "KEEP_DTYPE"
    assert "cube_math_type" not in before and after["cube_math_type"] == "0"
    assert after["allow_hf32_conv"] is False is after["allow_hf32_matmul"]
    assert after["allow_tf32_cudnn"] is False is after["allow_tf32_matmul"]
    assert after["allow_internal_format"] == after["jit_compile"] == "disable"
    assert after["acl_precision_mode"] == "must_keep_origin_dtype"
    assert "torch-npu" in versions
    documented = (root / "docs/capture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| `(\S+)` \|$", documented, re.M)
    read = {
        name: (f"`{before[name]}`" if name in before else "—", str(after[name])) for name in after
    }
    assert {name: (was, now) for name, was, now in rows} == {
        name: found for name, found in read.items() if name not in _OTHER_DEVICES
    }, "docs/capture.md, before and after"


def test_a_snapshot_of_memory_is_taken_as_torch_npu_takes_it(environment: dict[str, str]) -> None:
    """The calls of :mod:`rlprobe.capture.memory` bind to the real functions."""
    bound = _ask(
        environment,
        """
import inspect
memory = torch.npu.memory
history = inspect.signature(memory._record_memory_history)
history.bind(max_entries=100_000)
history.bind(enabled=None)
inspect.signature(memory._dump_snapshot).bind("rank0.pickle")
print(json.dumps([list(history.parameters), torch.npu.is_available()]))
""",
    )
    assert bound[1] is False


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.cell("device", "torch_npu 2.5 to 2.14: switches, memory", CONTRACT)
def test_each_version_has_what_is_called(version: str, tmp_path: Path) -> None:
    place = published.files(f"torch_npu=={version}", [_CONFIG, _MEMORY], tmp_path)
    config = ast.parse((place / _CONFIG).read_text(encoding="utf-8"))
    functions = {
        node.name: [argument.arg for argument in node.args.args]
        for node in config.body
        if isinstance(node, ast.FunctionDef)
    }
    assert functions["set_compile_mode"] == ["jit_compile"]
    assert len(functions["set_option"]) == 1
    settings = {
        node.value
        for node in ast.walk(config)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert {
        "allow_hf32", "allow_internal_format", "ALLOW_INTERNAL_FORMAT", "jitCompile",
        "ACL_PRECISION_MODE", "must_keep_origin_dtype", "ALLOW_MATMUL_HF32", "ALLOW_CONV_HF32",
    } <= settings  # fmt: skip
    if version not in ("2.5.1", "2.7.1"):  # which have no such option: recorded as absent
        members = {
            target.id
            for node in config.body
            if isinstance(node, ast.ClassDef) and node.name == "_CubeMathType"
            for line in node.body
            if isinstance(line, ast.Assign)
            for target in line.targets
            if isinstance(target, ast.Name)
        }
        assert "KEEP_DTYPE" in members and "cube_math_type" in settings
    memory = ast.parse((place / _MEMORY).read_text(encoding="utf-8"))
    named = {node.name for node in memory.body if isinstance(node, ast.FunctionDef)}
    assert {"_record_memory_history", "_dump_snapshot"} <= named
