"""What one node of an allocation does before and after a run's Ray: directories, address, ports.

Run once per node through ``srun`` with the Python that runs rlprobe; it imports the standard
library only, and writes one line of JSON to stdout.

    python -m rlprobe.runs.node prepare JOB --interface ib0 --peer node2
    python -m rlprobe.runs.node remove JOB
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import struct
import sys

from rlprobe.errors import RlprobeError, RunError
from rlprobe.runs import nodelocal

_SIOCGIFADDR = 0x8915
#: Ports that Ray would otherwise take at fixed numbers, where a second run on the node would
#: collide: the head's, the client server's and the dashboard agent's.
PORTS = ("head", "client", "agent")


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        RunError: there is no such interface, or it has no address; lists those there are.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RunError(
                f"{os.uname().nodename} has no IPv4 address on interface {interface!r}; it has: "
                f"{names} (resources.interface)"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where it is a further one of its interface.

    Names differ between nodes (``ens1f0`` here, ``enp23s0`` there), addresses tell them apart.
    """
    for _, name in socket.if_nameindex():
        try:
            if interface_address(name) == address:
                return name
        except RunError:
            continue  # an interface without an address
    return None


def address_towards(peer: str) -> str:
    """The IPv4 address from which this host reaches another.

    Raises:
        RunError: the peer's name does not resolve, or leads to the loopback, where Ray never joins.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))  # no packet is sent
        except OSError as error:
            raise RunError(
                f"{os.uname().nodename} finds no route to {peer}: {error}; name the network "
                "interface in resources.interface"
            ) from error
        address = str(probe.getsockname()[0])
    if address.startswith("127."):
        raise RunError(
            f"{peer} resolves to {os.uname().nodename}'s own loopback; name the network interface "
            "in resources.interface"
        )
    return address


def free_ports(count: int) -> list[int]:
    """Ports that nothing on this host listens on just now, all different."""
    held = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in held:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()


def prepare(job: str, interface: str | None, peer: str) -> dict[str, object]:
    """Make the job's directories; tell this node's name, address and free ports."""
    nodelocal.of_job(job).make()
    address = interface_address(interface) if interface else address_towards(peer)
    return {
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "address": address,
        "interface": interface or interface_of(address),
        "ports": dict(zip(PORTS, free_ports(len(PORTS)), strict=True)),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlprobe.runs.node")
    parser.add_argument("what", choices=("prepare", "remove"))
    parser.add_argument("job")
    parser.add_argument("--interface")
    parser.add_argument("--peer", default="localhost")
    given = parser.parse_args(arguments)
    try:
        if given.what == "remove":
            nodelocal.of_job(given.job).remove()
        else:
            print(json.dumps(prepare(given.job, given.interface, given.peer)))
    except RlprobeError as error:
        print(f"rlprobe: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
