"""Imports that are put off are made when something is asked for, and are then the real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor


def say(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize(
    "asked",
    [
        "importlib.metadata.version('polars')",
        "__import__('importlib.metadata').metadata.version('polars')",
        "sys.modules['importlib.metadata'].version('polars')",
    ],
)
def test_a_module_is_read_once_something_of_it_is_asked_for(asked: str) -> None:
    code = (
        "import sys, importlib; from rlprobe.imports import postpone; "
        "postpone('importlib.metadata'); import importlib.metadata; "
        "print('email' in sys.modules); "
        f"print({asked}); "
        "from importlib.metadata import version as again; print(again('polars')); "
        "print('email' in sys.modules, type(sys.modules['importlib.metadata']).__name__)"
    )
    before, found, again, *after = say(code).split()
    assert before == "False" and after == ["True", "module"]
    assert found == again and found[0].isdigit()


def test_a_module_that_is_there_already_stays() -> None:
    code = (
        "import importlib.metadata as m, sys; from rlprobe.imports import postpone; "
        "postpone('importlib.metadata'); print(sys.modules['importlib.metadata'] is m)"
    )
    assert say(code) == "True"


def test_a_name_that_it_has_not_is_told_as_ever() -> None:
    code = (
        "import sys; from rlprobe.imports import postpone; postpone('importlib.metadata')\n"
        "import importlib.metadata\n"
        "try:\n importlib.metadata.nothing\nexcept AttributeError as error:\n print(error)"
    )
    assert "has no attribute 'nothing'" in say(code)


def test_comparing_reads_no_mail_and_starts_no_process(tmp_path: Path) -> None:
    """What polars imports and a comparison never uses is not read, small dumps are decoded here."""
    (tmp_path / "dump.json").write_text('{"data": {}}')
    code = (
        "import sys; from rlprobe.cli import main; "
        f"main(['compare', {str(tmp_path)!r}, {str(tmp_path)!r}, '-o', {str(tmp_path) + '-out'!r},"
        " '-q', '--no-fail']); "
        "print(*[n for n in ('email', 'multiprocessing', 'polars') if n in sys.modules])"
    )
    assert say(code) == "polars"


def test_two_dumps_that_are_judged_and_printed_open_no_store(tmp_path: Path) -> None:
    """What reads stored runs, with the models of their manifests, is a seventh of a small pair."""
    for side, top in (("b", 1.0), ("t", 1.5)):
        made = {"Module.a.Linear.forward.0": call([tensor()], [tensor((top, -1.0, 0.25, 2.0))])}
        dumps.write(tmp_path / side / "step0/rank0", made)
    sides = [str(tmp_path / side) for side in "bt"]
    code = (
        "import sys; from rlprobe.cli import main; "
        f"main(['compare', *{sides!r}, '-o', {str(tmp_path / 'o')!r}]); "
        "print(*[n for n in ('rlprobe.store.read', 'rlprobe.store.manifest', 'pydantic', 'numba') "
        "if n in sys.modules], sep=',')"
    )
    code += "; print('that is all')"
    first, *_, imported, last = say(code).splitlines()
    assert first.startswith("First to part: a (Linear)") and last == "that is all"
    assert imported == ""
