"""A reader who goes, Ctrl-C, a package that is lacking: the right exit code, and no traceback?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe.frameworks import plain

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def closed(*words: str, both: bool = False, cwd: Path) -> tuple[int, str]:
    """Exit code and stderr of a command whose output nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rlprobe", *words],
            cwd=cwd,
            stdout=write,
            stderr=write if both else subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    finally:
        os.close(write)
    return done.returncode, done.stderr or ""


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("config", "check", "nope.yaml"), 2),
        (("compare", "nope", "neither"), 2),
        (("store", "verify", "--store", "nope"), 1),
        (("help",), 0),
        (("config", "schema"), 0),
        ((), 2),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, tuple) else None,
)
def test_a_closed_pipe_leaves_the_exit_code(
    words: tuple[str, ...], code: int, both: bool, tmp_path: Path
) -> None:
    expected = subprocess.run(
        [sys.executable, "-m", "rlprobe", *words],
        cwd=tmp_path, capture_output=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).returncode  # fmt: skip
    assert expected == code
    found, said = closed(*words, both=both, cwd=tmp_path)
    assert found == code, said
    assert "Traceback" not in said and "Broken pipe" not in said


def test_a_package_that_is_lacking_is_named(tmp_path: Path) -> None:
    """As in an image in which rlprobe was installed without what it needs."""
    verdict, check = ["verdict", "x"], ["config", "check", "x"]
    for module, command in (("msgspec", verdict), ("polars", verdict), ("pydantic", check)):
        hook = f"import sys; sys.modules[{module!r}] = None"
        code = f"{hook}; from rlprobe.cli import main; sys.exit(main({command}))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
            check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert done.stderr.startswith(f"rlprobe: error: this needs {module}, which ")
        assert done.stderr.count("\n") == 1 and "pip install" in done.stderr


def test_a_training_that_cannot_be_recorded_does_not_start(tmp_path: Path) -> None:
    file = plain.write(tmp_path / "recording")
    code = (
        f"import os, sys; os.environ['RLPROBE_CONFIG'] = {str(file)!r};"
        "sys.modules['msgspec'] = None;"
        "import rlprobe.autoload; print('trains')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("rlprobe: error: this needs msgspec, which ")


@pytest.mark.parametrize("while_reading", ["rlprobe.cli", "rlprobe.cli.verdict", "rlprobe.errors"])
def test_ctrl_c_while_modules_are_read_is_no_traceback(while_reading: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {while_reading!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from rlprobe.__main__ import main\n"
        "sys.argv = ['rlprobe', 'verdict', 'nowhere']\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "rlprobe: error: interrupted\n")
