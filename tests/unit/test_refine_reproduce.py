"""Does the folder for the kernel team show the divergence, with plain torch and nothing else?"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rlprobe.capture.trace.replay import error, load  # noqa: E402
from rlprobe.cli import main  # noqa: E402
from rlprobe.diagnose.diagnosis import NAME, UNKNOWN, Cause, Diagnosis  # noqa: E402
from rlprobe.files import replace_bytes  # noqa: E402
from rlprobe.judge.inputs import PlannedPair, PlannedRun  # noqa: E402
from rlprobe.judge.inputs import write as write_plan  # noqa: E402
from rlprobe.refine import refined, suspects  # noqa: E402
from rlprobe.spec import Suspects  # noqa: E402
from rlprobe.store.commit import commit  # noqa: E402
from rlprobe.store.keys import run_key  # noqa: E402
from rlprobe.store.read import Run  # noqa: E402
from tests.msprobe import dumps  # noqa: E402
from tests.unit.capture_helpers import UPDATE  # noqa: E402
from tests.unit.traced import LAYER, NORM, plain_loss, run, wrapped  # noqa: E402

pytestmark = pytest.mark.slow

RECORD = "Module.layers.1.norm.RmsNorm.forward.0.output.0"


def results(
    root: Path,
    change: Callable[[Any], None],
    module: str = NORM,
    record: str = RECORD,
    kind: str = "module",
    origin: str = "",
    harmed: Mapping[str, Any] = {},
    **wanted: Any,
) -> Path:
    """A results directory that was refined: two runs with traces in a store."""
    path = module if kind == "module" else None
    keys = {}
    for role, harm in (("benchmark", lambda _: None), ("target", change)):
        scratch = root / role
        (scratch / "side").mkdir(parents=True)
        run(scratch, harm, kind=kind, module=path, **(harmed if role == "target" else {}))
        declared = {"role": role, "name": str(scratch)}
        keys[role] = run_key(declared)
        commit(scratch, root / "store", keys[role], declared)
    directory = root / "results"
    write_plan(
        directory / "alignment.json", name="a", store=root / "store",
        runs={role: PlannedRun(key, "cpu", "fp32", [UPDATE]) for role, key in keys.items()},
        pairs={"target": PlannedPair("benchmark", "target", [UPDATE])},
    )  # fmt: skip
    look = Suspects(
        **{
            "stage": UPDATE, "step": 0, "rank": 0, "modules": (LAYER,), "micro_steps": (0,),
            "record": record, "trace": kind, "trace_module": path, **wanted,
        }
    )  # fmt: skip
    plan = suspects.Plan(look, keys["benchmark"], keys["target"], origin=origin)
    suspects.write(directory, plan)
    sides = [Run.open(root / "store", key) for key in keys.values()]
    refined.write(directory, refined.refine(plan, look, *sides))
    found = Diagnosis(
        verdict="diverged", sentence="a: target and benchmark part. Its cause is not known.",
        gate=[], first=None, cause=Cause("unknown", UNKNOWN, "", []),
        coverage={}, noise={"first": {"floor": 1e-6}}, stages=[],
    )  # fmt: skip
    replace_bytes(directory / NAME, json.dumps(found.as_dict()).encode())
    return directory


def larger(made: Any) -> None:
    made.layers[1].norm.eps = 1e-2


@dataclass
class Done:
    returncode: int
    stdout: str


def script(folder: Path, *words: str) -> Done:
    """Run the folder's script in this process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = runpy.run_path(str(folder / "reproduce.py"))["main"](list(words))
    return Done(code, said.getvalue())


def test_the_script_needs_torch_alone(tmp_path: Path) -> None:
    directory, out = results(tmp_path, larger), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    command = [sys.executable, "-I", str(out / "reproduce.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "rlprobe" not in (out / "reproduce.py").read_text()


def test_the_folder_shows_the_divergence(tmp_path: Path) -> None:
    directory, out = results(tmp_path, larger), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    done = script(out, "--device", "cpu")
    assert done.returncode == 3, done.stdout
    assert "a: target and benchmark part" in done.stdout
    assert "against the benchmark's in fp64: benchmark " in done.stdout
    # what each side recorded comes out again, bit for bit
    assert "target's on cpu against what the target recorded: 0\n" in done.stdout
    assert script(out, "--tolerance", "10").returncode == 0


@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_a_device_that_is_not_here_is_one_line(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, out = results(tmp_path, larger), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = script(out, "--device", device)
    assert (done.returncode, done.stdout.count("\n")) == (1, 1), done.stdout
    assert done.stdout.startswith(f"cannot be run on {device}: ")


def test_sides_that_agree_exit_0(tmp_path: Path) -> None:
    directory, out = results(tmp_path, lambda _: None), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    done = script(out)
    assert done.returncode == 0, done.stdout
    assert "they agree" in done.stdout


def test_a_module_with_others_within_is_run_with_what_these_made(tmp_path: Path) -> None:
    def halved(made: Any) -> None:
        layer = made.layers[1]
        right = layer.forward
        layer.forward = lambda x: right(x) * 0.5

    record = "Module.layers.1.Block.forward.0.output.0"
    directory = results(tmp_path, halved, LAYER, record)
    out = tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    done = script(out)
    assert done.returncode == 3, done.stdout
    assert "against the benchmark's: 0.5\n" in done.stdout


def test_a_backward_is_run_too(tmp_path: Path) -> None:
    def bent(made: Any) -> None:
        norm = made.layers[1].norm
        right = norm.forward

        def forward(x: Any) -> Any:
            y = right(x)
            return y + (y * 0.01 - (y * 0.01).detach())

        norm.forward = forward

    record = "Module.layers.1.norm.RmsNorm.backward.0.output.0"
    directory, out = results(tmp_path, bent, record=record), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    done = script(out)
    assert done.returncode == 3, done.stdout


def test_without_data_numbers_of_the_same_size_stand_in(tmp_path: Path) -> None:
    directory, out = results(tmp_path, larger), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out), "--no-data"]) == 0
    assert not list(out.glob("*.safetensors"))
    assert script(out).returncode == 3


def test_tensors_are_those_of_the_run(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    directory, out = results(tmp_path, wrapped(lambda y: y.bfloat16().float())), tmp_path / "out"
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    ours, theirs = (
        load(out / "target.safetensors"),
        safetensors.load_file(out / "target.safetensors"),
    )
    assert ours.keys() == theirs.keys() and len(ours) >= 3
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert torch.equal(ours["result0"], ours["result0"].bfloat16().float())


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda d: (d / "refine" / "refined.json").unlink(), "was not refined"),
        (lambda d: (d / "refine" / "suspects.json").unlink(), "cannot be read"),
        (lambda d: (d.parent / "out").mkdir() or (d.parent / "out" / "x").touch(), "is not empty"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, harm: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = results(tmp_path, larger)
    harm(directory)
    assert main(["reproduce", str(directory), "-o", str(tmp_path / "out")]) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out" / "about.json").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(("lr", "code"), [(1.05e-2, 3), (1e-2, 0)])
def test_an_update_is_run_on_its_gradients(tmp_path: Path, lr: float, code: int) -> None:
    """What it adds to the parameters is compared: they are far larger than that."""
    directory, out = (
        results(tmp_path, lambda _: None, kind="update", harmed={"lr": lr}),
        tmp_path / "o",
    )
    assert main(["reproduce", str(directory), "-o", str(out)]) == 0
    done = script(out)
    assert done.returncode == code, done.stdout
    shown = [line for line in done.stdout.splitlines() if "against the benchmark's:" in line]
    assert len(shown) > 10, "every parameter"
    assert all(abs(float(line.rsplit(" ", 1)[1]) - (lr / 1e-2 - 1)) < 1e-5 for line in shown)
    assert script(out, "--tolerance", "0.1").returncode == 0


def test_a_loss_is_run_on_what_the_model_made(tmp_path: Path) -> None:
    def flatter(logits: Any) -> Any:
        return plain_loss(logits) * 1.01

    for name, wrong in (("same", plain_loss), ("other", flatter)):
        directory = results(tmp_path / name, lambda _: None, kind="outputs", harmed={"loss": wrong})
        out = tmp_path / name / "out"
        assert main(["reproduce", str(directory), "-o", str(out)]) == 0
        done = script(out)
        assert done.returncode == (3 if name == "other" else 0), done.stdout
        assert ("against the benchmark's: 0.01\n" in done.stdout) == (name == "other")


def test_what_happens_within_the_backward_pass_has_no_call_to_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = results(tmp_path, larger, kind="update", origin="reduction")
    assert main(["reproduce", str(directory), "-o", str(tmp_path / "out")]) == 1
    assert "parts in the reduction of its gradients" in capsys.readouterr().err


def test_error_of_what_is_not_finite() -> None:
    one = torch.tensor([1.0, float("nan")])
    assert error(one, torch.tensor([1.0, 2.0])) == float("inf")
    assert error(one, one) == 0.0
    assert error(nn.Parameter(torch.ones(3)).detach(), torch.ones(2)) == float("inf")


def test_a_full_disk_leaves_no_half_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = results(tmp_path, larger)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *args[:1])

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full)
        broken.setattr(os, "rename", full)
        assert main(["reproduce", str(directory), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "Traceback" not in said
    assert not (tmp_path / "out" / "about.json").exists()


def test_of_two_dumps_nothing_can_be_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, top in (("b", 1.0), ("t", 2.0)):
        entry = dumps.call([dumps.tensor()], [dumps.tensor((top, -1.0, 0.25, 2.5))])
        dumps.write(tmp_path / side, {"Functional.linear.0.forward": entry})
    out = str(tmp_path / "o")
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", out]) == 0
    assert main(["diagnose", out]) == 0
    assert main(["reproduce", out, "-o", str(tmp_path / "folder")]) == 1
    assert "comparison of two dumps" in capsys.readouterr().err
    assert not (tmp_path / "folder").exists()
