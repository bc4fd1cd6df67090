"""A real checkout of slime, where one is at hand.

``RLPROBE_SLIME_CHECKOUT=DIR`` names it: its source then must have every hook point.
``RLPROBE_SLIME_ALIGNMENT=FILE`` besides names an alignment with ``framework: slime`` that this
machine can run: its benchmark and its target are run with the hooks. Without them these tests are
skipped, and nothing here says that a real slime works.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe.config import load
from rlprobe.frameworks.slime import hooks, manager_paths, plan, versions
from rlprobe.runs.plan import plan as runs_of

CHECKOUT = os.environ.get("RLPROBE_SLIME_CHECKOUT")
ALIGNMENT = os.environ.get("RLPROBE_SLIME_ALIGNMENT")

needs_checkout = pytest.mark.skipif(
    not CHECKOUT,
    reason="RLPROBE_SLIME_CHECKOUT names no checkout of slime: no real slime was looked at",
)
needs_alignment = pytest.mark.skipif(
    not ALIGNMENT,
    reason="RLPROBE_SLIME_ALIGNMENT names no alignment: no real slime was run",
)

#: Where hook points are defined, when not in the module that is hooked.
_DEFINED_IN = {
    ("train", hooks.ACTOR): "slime/backends/megatron_utils/model.py",
    ("forward_only", hooks.ACTOR): "slime/backends/megatron_utils/model.py",
    ("loss_function", hooks.MODEL): "slime/backends/megatron_utils/loss.py",
}


def arguments(path: Path, name: str) -> list[str] | None:
    """Arguments of a function or method by its dotted name, None where it does not exist."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == part
        ]
        if not found:
            return None
        node = found[-1]
        if isinstance(node, ast.ClassDef):
            body = node.body
            continue
        spec = node.args
        return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
    return None


@needs_checkout
@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in hooks.REQUIRED.items() for name in names],
)
def test_the_source_has_the_hook_point(module: str, name: str) -> None:
    assert CHECKOUT is not None
    file = _DEFINED_IN.get((name, module), module.replace(".", "/") + ".py")
    found = arguments(Path(CHECKOUT) / file, name)
    assert found is not None, f"{file} has no {name}"
    assert set(hooks.REQUIRED[module][name]) <= set(found)


@needs_checkout
def test_actor_uses_the_functions_it_imports() -> None:
    """``train`` and ``forward_only`` are wrapped in actor.py: it must call them by those names."""
    assert CHECKOUT is not None
    text = (Path(CHECKOUT) / "slime/backends/megatron_utils/actor.py").read_text(encoding="utf-8")
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {"train", "forward_only"} <= calls


@needs_alignment
@pytest.mark.e2e
@pytest.mark.parametrize("role", ["benchmark", "target"])
def test_a_run_of_real_slime(role: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every stage is captured, under slime's name for it, with nothing of another stage."""
    assert ALIGNMENT is not None
    store = Path(os.environ.get("RLPROBE_SLIME_STORE") or tmp_path_factory.getbasetemp() / "store")
    done = subprocess.run(
        [
            sys.executable, "-c", "import sys; from rlprobe.cli import main; sys.exit(main())",
            "run", "--config", ALIGNMENT, "--role", role, "--store", str(store),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    spec = runs_of(load(ALIGNMENT))[role]
    run = store / "runs" / spec.key
    manifest = json.loads((run / "manifest.json").read_text())
    captured = {s for s, state in manifest["stages"].items() if state["state"] == "captured"}
    assert captured == set(spec.stages)
    step = f"step{spec.steps.start}"
    dumps = {
        stage: json.loads(
            next((run / "dump" / plan.DIRECTORIES[stage] / step).glob("*/dump.json")).read_text()
        )
        for stage in captured
    }
    forwards = [
        [name for name in dump["data"] if ".forward." in name or name.endswith(".forward")]
        for stage, dump in dumps.items()
        if "critic" not in stage
    ]
    assert all(found == forwards[0] for found in forwards), "the stages run the same forward"
    if role != "benchmark":
        proof = json.loads((run / "mock_proof.json").read_text())
        assert proof


def test_the_versions_said_to_be_known_have_signatures(root: Path) -> None:
    tags = json.loads((root / "tests/slime/signatures.json").read_text())
    for version in versions.KNOWN:
        assert ("HEAD" if version == "main" else f"v{version}") in tags
    assert manager_paths.RECORDED != manager_paths.REPLAYED
