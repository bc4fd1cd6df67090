"""What docker's own client makes of rlprobe's command lines: the request that its daemon would get.

The client is the real one; the daemon is a stand-in that keeps what it is asked and starts nothing.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rlprobe.config import ContainerSection
from rlprobe.runs import containers, devices

pytestmark = pytest.mark.skipif(not shutil.which("docker"), reason="no docker client here")
JOB = "77.5"
#: A daemon that says so much has the client use this version of its interface.
_API = "1.41"


@dataclass
class Daemon:
    """What a stand-in was asked for: containers by POST, questions by path and query."""

    created: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, list[str]]]] = field(default_factory=list)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    found = Daemon()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            url = urlsplit(self.path)
            path = url.path.removeprefix(f"/v{_API}")
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            found.asked.append((self.command, path, parse_qs(url.query)))
            status, said = 200, "{}"
            if path == "/containers/create":
                found.created.append(json.loads(body))
                status, said = 500, json.dumps({"message": "a stand-in starts nothing"})
            elif path == "/containers/json":
                said = json.dumps([{"Id": "abc123", "Names": ["/x"], "Labels": {}}])
            elif path.startswith("/images/"):
                said = json.dumps({"Id": "sha256:feed"})
            elif self.command == "DELETE":
                status, said = 204, ""
            self.send_response(status)
            self.send_header("Api-Version", _API)
            self.send_header("Ostype", "linux")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.encode())

        do_GET = do_POST = do_DELETE = do_HEAD = answer

        def log_message(self, format: str, *words: object) -> None:
            """Nothing on the terminal."""

        def address_string(self) -> str:
            return "client"

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    # a socket's path is short, a test's directory is not
    with tempfile.TemporaryDirectory(prefix="rlp-") as place:
        socket = f"{place}/docker.sock"
        with Server(socket, Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
            monkeypatch.setenv("DOCKER_CONFIG", place)
            monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
            yield found
            server.shutdown()


def entered(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, device: str = "cpu",
    args: tuple[str, ...] = (), env: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The container that the client asks for."""
    work = tmp_path / "work"
    (work / "s").mkdir(parents=True)
    monkeypatch.chdir(work)
    container = ContainerSection(runtime="docker", image="registry.example.org/verl:1", args=args)
    argv = containers.wrap(
        ["python", "-m", "framework", "a b"], env or {}, container, device, [], JOB, work / "s"
    )
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    # docker's status for "the daemon said no": every option before it was understood
    assert done.returncode == 125 and "a stand-in starts nothing" in done.stderr, done.stderr
    (request,) = daemon.created
    return request


def test_a_run_is_one_container_of_the_user_with_the_job_s_directories(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    request = entered(daemon, tmp_path, monkeypatch, env={"SEED": "a b,c"})
    host = request["HostConfig"]
    assert request["Image"] == "registry.example.org/verl:1"
    assert request["User"] == f"{os.getuid()}:{os.getgid()}"
    assert request["Labels"] == {"rlprobe.job": JOB}
    assert request["WorkingDir"] == str(tmp_path / "work")
    assert host["NetworkMode"] == "host" and host["AutoRemove"] and host["Init"]
    assert host["ShmSize"] == 64 << 30
    assert host["Ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    binds = host["Binds"]
    for place in ("/tmp:/tmp", "/home:/home/rlprobe"):
        assert len([bind for bind in binds if bind.endswith(f"/rlprobe-{JOB}{place}")]) == 1
    assert f"{tmp_path}/work:{tmp_path}/work" in binds
    assert any(bind.endswith(":/opt/rlprobe/host/rlprobe:ro") for bind in binds)
    # the command goes on after the image as the entry point's arguments, words as they were
    words = [*request["Entrypoint"], *request["Cmd"]]
    assert words[0] == "/bin/bash" and words[-4:] == ["python", "-m", "framework", "a b"]
    assert "SEED=a b,c" in words
    # nothing of the shell
    assert not request["Env"] and not any("OMP_NUM_THREADS" in word for word in words)


def test_gpus_and_a_site_s_own_arguments_are_asked_for(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = entered(
        daemon, tmp_path, monkeypatch, device="cuda", args=("--shm-size", "8g", "--privileged")
    )
    host = request["HostConfig"]
    (asked,) = host["DeviceRequests"]
    assert asked["Count"] == -1 and asked["Capabilities"] == [["gpu"]]
    assert host["ShmSize"] == 8 << 30 and host["Privileged"]


def test_npus_are_devices_with_the_driver_and_its_group(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [tmp_path / name for name in ("davinci0", "davinci1")]
    for node in nodes:
        node.touch()
        os.chown(node, -1, 4711) if os.geteuid() == 0 else None
    monkeypatch.setattr(devices, "device_nodes", lambda kind: [str(node) for node in nodes])
    request = entered(daemon, tmp_path, monkeypatch, device="npu")
    host = request["HostConfig"]
    assert [one["PathOnHost"] for one in host["Devices"]] == [str(node) for node in nodes]
    assert {one["CgroupPermissions"] for one in host["Devices"]} == {"rwm"}
    groups = {str(node.stat().st_gid) for node in nodes} - {str(os.getgid())}
    assert set(host["GroupAdd"] or ()) == groups


def test_only_the_job_s_containers_are_asked_for_and_removed(daemon: Daemon) -> None:
    container = ContainerSection(runtime="docker", image="registry.example.org/verl:1")
    containers.stop(container, JOB)
    (listed,) = [query for _, path, query in daemon.asked if path == "/containers/json"]
    assert json.loads(listed["filters"][0]) == {"label": {f"rlprobe.job={JOB}": True}}
    (removed,) = [(path, query) for method, path, query in daemon.asked if method == "DELETE"]
    assert removed == ("/containers/abc123", {"force": ["1"]})
    assert containers.image_id(container) == "sha256:feed"
