"""The environment that a real vLLM is in, made on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: What the installer ends with where the lock's wheels are of another platform.
_NO_WHEEL = 3


@pytest.fixture(scope="session")
def python() -> str:
    """The Python of that environment; ``RLPROBE_ENGINES`` names another one's."""
    given = os.environ.get("RLPROBE_ENGINES")
    if given:
        return given
    venv = ROOT / ".venv-engines"
    done = subprocess.run(
        [ROOT / "workflow/install-engines", sys.executable, venv],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == _NO_WHEEL:
        pytest.skip(f"no vLLM for this platform: {done.stderr.strip()}")
    if done.returncode:
        pytest.fail(f"the environment of vLLM was not made:\n{done.stderr}", pytrace=False)
    return str(venv / "bin/python")
