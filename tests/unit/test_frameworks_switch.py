"""What does RLPROBE_CONFIG name, and what is said when it names nothing of use?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlprobe.capture.session import CaptureOptions, ReplayOptions, Session
from rlprobe.errors import ConfigError
from rlprobe.frameworks import switch


def _session(tmp_path: Path) -> Session:
    return Session(
        role="target",
        framework="verl",
        dump=str(tmp_path / "dump"),
        side=str(tmp_path / "side"),
        capture=CaptureOptions(stages=("actor_update",), token_range=(0, 1)),
        replay=ReplayOptions(path="/r", seed=-1),
        expected_stages=("actor_update",),
    )


def test_a_session_survives_its_file(tmp_path: Path) -> None:
    session = _session(tmp_path)
    path = tmp_path / "session.json"
    path.write_text(session.to_json())
    found = switch.read(path)
    assert (found.kind, found.frameworks) == ("session", ("verl",))
    assert found.session == session


def test_the_vendors_yaml_is_a_collector(tmp_path: Path) -> None:
    path = tmp_path / "precision_collector.yaml"
    path.write_text("precision_collector:\n  msprobe: true\n")
    assert switch.read(path).kind == "collector"


def test_msprobes_config_is_for_slime(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"task": "statistics", "dump_path": "/d", "level": "mix"}')
    found = switch.read(path)
    assert (found.kind, found.frameworks) == ("msprobe", ("slime",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "not JSON"),
        ("a: [", "not YAML"),
        ("something: else\n", "neither"),
        ("{}", "neither"),
    ],
)
def test_anything_else_is_refused_with_its_path(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        switch.read(path)
    assert str(path) in str(caught.value)


def test_a_session_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_text(_session(tmp_path).to_json().replace('"seed": 1234', '"seeed": 1234'))
    with pytest.raises(ConfigError, match="seeed"):
        switch.read(path)


def test_a_process_with_a_broken_switch_ends_with_one_line(tmp_path: Path) -> None:
    code = "import rlprobe.autoload; print('went on')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        env={**os.environ, "RLPROBE_CONFIG": str(tmp_path / "missing.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "went on" not in done.stdout
    assert done.stderr.count("\n") == 1
    assert "missing.json" in done.stderr
