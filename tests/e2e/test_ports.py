"""Does the Ray of a run on one node listen to this node alone?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rlprobe import frameworks
from rlprobe.config import load
from rlprobe.frameworks.verl.host.plan import from_overrides
from rlprobe.runs.launch import own_ray
from rlprobe.runs.plan import plan

ROOT = Path(__file__).resolve().parents[2]
_LISTENING = "0A"
_DASHBOARD = 8265
#: As verl starts it, with an actor; then every socket that a process of its tree listens on.
_RAY = """
import json, sys
import ray
from tests.e2e.test_ports import listening
ray.init(**json.loads(sys.argv[1]))
@ray.remote
class Actor:
    def answer(self):
        return 1
actor = Actor.remote()
assert ray.get(actor.answer.remote()) == 1
print(json.dumps(listening("RLPROBE_PORTS_TEST=1")))
"""


def listening(mark: str) -> list[tuple[str, str, int]]:
    """Every listening socket of the processes that carry ``mark`` in their environment.

    Command, local address (hexadecimal, as the kernel shows it), port.
    """
    addresses = {}
    for family in ("tcp", "tcp6"):
        for line in Path("/proc/net", family).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                address, _, port = fields[1].partition(":")
                addresses[f"socket:[{fields[9]}]"] = (address, int(port, 16))
    found = []
    for process in Path("/proc").iterdir():
        try:
            if mark.encode() not in (process / "environ").read_bytes().split(b"\0"):
                continue
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            for descriptor in (process / "fd").iterdir():
                target = str(descriptor.readlink())
                if target in addresses:
                    found.append((command, *addresses[target]))
        except OSError:
            continue  # it has ended, or is no process
    return found


def _loopback(address: str) -> bool:
    """127.0.0.0/8 or ::1; the kernel writes each 32-bit word with its last byte first."""
    if len(address) == 8:
        return address.endswith("7F")
    mapped = address.startswith("0000000000000000FFFF0000") and address.endswith("7F")
    return mapped or address == "00000000000000000000000001000000"


def test_what_counts_as_loopback() -> None:
    assert _loopback("0100007F")
    assert _loopback("0000000000000000FFFF00000100007F")
    assert _loopback("00000000000000000000000001000000")
    assert not _loopback("00000000")
    assert not _loopback("0" * 32)
    assert not _loopback("020200C0")


def test_ray_on_one_node_listens_on_loopback_only(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    spec = plan(load("config/config.yaml"))["benchmark"]
    places = frameworks.RunDirectories(scratch=tmp_path, assets=tmp_path)
    words = frameworks.get("verl").command(spec, places)
    overrides = [word.lstrip("+") for word in words if word.startswith("+ray_kwargs.")]
    settings = from_overrides(overrides)["ray_kwargs"]["ray_init"]
    assert settings["include_dashboard"] is False
    program = tmp_path / "program.py"
    program.write_text(_RAY)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
         f"import tests; tests.__path__ = [{str(ROOT / 'tests')!r}]; "
         f"exec(open({str(program)!r}).read())", json.dumps(settings)],
        env={**os.environ, **own_ray(spec), "RLPROBE_PORTS_TEST": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert any("gcs_server" in command for command, *_ in found)
    assert any("raylet" in command for command, *_ in found)
    assert [socket for socket in found if not _loopback(socket[1])] == []
    assert _DASHBOARD not in {port for *_, port in found}
