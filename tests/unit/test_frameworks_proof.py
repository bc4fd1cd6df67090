"""Is a run refused when it was not what its key says?"""

from __future__ import annotations

import pytest

from rlprobe.capture.session import Session
from rlprobe.errors import HookError
from rlprobe.frameworks import proof


def session(declared: str | None) -> Session:
    return Session(role="target", framework="verl", dump="d", side="s", framework_version=declared)


@pytest.mark.parametrize(
    ("declared", "installed"),
    [(None, "0.8.0"), ("0.9.1", "0.9.1"), ("v0.9.1", "0.9.1"), ("0.9.1", "0.9.1+npu")],
)
def test_the_declared_version_is_accepted(declared: str | None, installed: str) -> None:
    proof.require_version(session(declared), installed)


@pytest.mark.parametrize("installed", ["0.9.0", "0.9.10", "(not installed as a package)"])
def test_another_version_is_refused_and_both_are_named(installed: str) -> None:
    with pytest.raises(
        HookError, match="framework_version says verl 0.9.1, but .*" + installed[1:5]
    ):
        proof.require_version(session("0.9.1"), installed)
