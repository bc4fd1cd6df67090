"""Several hosts on one machine: network namespaces on one bridge, each with an address of its own.

    python -m services.hosts up gpu01 npu01 npu02
    python -m services.hosts down gpu01 npu01 npu02

Needs root (CAP_NET_ADMIN). The machine itself is the bridge's first address; nothing leaves it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

BRIDGE = "rlprobe0"
INTERFACE = "eth0"
_NETWORK = "10.213.77"
CONTROLLER = f"{_NETWORK}.1"


def address(index: int) -> str:
    """The address of the index-th host, counted from 0."""
    return f"{_NETWORK}.{index + 2}"


def namespace(name: str) -> str:
    return f"rlprobe-{name}"


def inside(name: str) -> list[str]:
    """What a command on that host is started with.

    Not ``ip netns exec``: that mounts a fresh /sys without the cgroups slurmd looks for.
    """
    return ["nsenter", f"--net=/run/netns/{namespace(name)}"]


def up(names: Sequence[str]) -> dict[str, str]:
    """Make the hosts; returns each one's address. Idempotent."""
    existing = _names()
    if not _exists(BRIDGE):
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    addresses = {}
    for index, name in enumerate(names):
        addresses[name] = address(index)
        if namespace(name) in existing:
            continue
        _ip("netns", "add", namespace(name))
        outer = f"rlp-{name}"[:15]
        if _exists(outer):  # of a host whose last process outlived its session
            _ip("link", "delete", outer)
        peer = ("type", "veth", "peer", "name", INTERFACE, "netns", namespace(name))
        _ip("link", "add", outer, *peer)
        _ip("link", "set", outer, "master", BRIDGE, "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address(index)}/24", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
        ):
            _ip("-n", namespace(name), *command)
    return addresses


def rename(name: str, old: str, new: str) -> None:
    """Call a host's interface otherwise, as interfaces are that differ between machines."""
    for command in (("down",), ("name", new), ("up",)):
        _ip("-n", namespace(name), "link", "set", old if command != ("up",) else new, *command)


def processes(name: str) -> dict[int, str]:
    """What runs on a host: process numbers and their command lines."""
    found = {}
    for word in _ip("netns", "pids", namespace(name)).split():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{word}/cmdline").read_bytes()
            found[int(word)] = line.replace(b"\0", b" ").decode().strip()
    return found


def kill(name: str, which: Callable[[str], bool] = lambda line: True) -> list[str]:
    """Kill what runs on a host and has such a command line; all of it is a host without power."""
    killed = {pid: line for pid, line in processes(name).items() if which(line)}
    for pid in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(killed.values())


def down(names: Sequence[str]) -> None:
    """Remove exactly these hosts and the bridge."""
    existing = _names()
    for name in names:
        if namespace(name) in existing:
            _ip("netns", "delete", namespace(name))
    if _exists(BRIDGE):
        _ip("link", "delete", BRIDGE)


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    try:
        _ip("netns", "add", namespace("probe"))
        _ip("netns", "delete", namespace("probe"))
    except FileNotFoundError:
        return "ip (iproute2) is not installed"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return None


def _names() -> set[str]:
    return {line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()}


def _exists(link: str) -> bool:
    shown = subprocess.run(["ip", "link", "show", link], capture_output=True, check=False)
    return shown.returncode == 0


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.hosts")
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("names", nargs="+")
    given = parser.parse_args()
    if given.what == "down":
        down(given.names)
        return
    for name, found in up(given.names).items():
        print(f"{name} {found}")


if __name__ == "__main__":
    main()
