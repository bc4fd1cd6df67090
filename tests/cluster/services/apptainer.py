"""Real Apptainer on Debian 12, without touching the system's libc.

    python -m services.apptainer        installs it and prints the export line for PATH

Debian 12 and 13 carry no apptainer. Debian sid does, linked against a newer glibc, so its packages
are unpacked into a prefix of their own and the two executables are pointed at the libc beside them.
Needs root and Debian's package servers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

PREFIX = Path("/opt/rlprobe-test/apptainer")
_TOOLS = ("patchelf", "squashfs-tools", "libseccomp2", "libsqlite3-0", "uidmap", "libcap2-bin")
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


def binary(prefix: Path = PREFIX) -> Path:
    return prefix / "usr" / "bin" / "apptainer"


def why_not() -> str | None:
    """Why Apptainer cannot be had here; None if it can."""
    if _installed(PREFIX) or shutil.which("apptainer"):
        return None
    if os.geteuid() != 0:
        return "needs root, to install Apptainer"
    if not shutil.which("apt-get") or os.uname().machine != "x86_64":
        return "Apptainer is not on PATH, and is installed for this test on Debian x86_64 only"
    return None


def directory() -> Path:
    """The directory that holds the ``apptainer`` to use, installed on first use.

    Raises:
        RuntimeError: a package cannot be fetched or does not run.
    """
    found = shutil.which("apptainer")
    if found is not None:
        return Path(found).parent
    if not _installed(PREFIX):
        _install(PREFIX)
    return binary().parent


def _installed(prefix: Path) -> bool:
    with contextlib.suppress(OSError):
        return _run([str(binary(prefix)), "--version"], check=False).returncode == 0
    return False


def _install(prefix: Path) -> None:
    shutil.rmtree(prefix, ignore_errors=True)
    packages = prefix / "debs"
    packages.mkdir(parents=True)
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    _run([*apt, "update"])
    _run([*apt, "install", "-y", "--no-install-recommends", *_TOOLS])
    _fetch_from_sid(prefix, packages, ["apptainer", "libc6"])
    for package in packages.glob("*.deb"):
        target = prefix / "glibc" if package.name.startswith("libc6_") else prefix
        _run(["dpkg-deb", "-x", str(package), str(target)])
    _relocate(prefix)
    _allow_our_root(prefix)
    shutil.rmtree(packages)
    if not _installed(prefix):
        raise RuntimeError(f"{binary(prefix)} was installed but does not run")


def _fetch_from_sid(prefix: Path, packages: Path, names: list[str]) -> None:
    """Download from sid without making it one of this machine's sources."""
    lists = prefix / "apt"
    (lists / "lists" / "partial").mkdir(parents=True)
    source = lists / "sid.list"
    source.write_text(f"deb [signed-by={_KEYRING}] {_mirror()} sid main\n")
    options = [
        f"Dir::Etc::sourcelist={source}",
        "Dir::Etc::sourceparts=-",
        f"Dir::State::lists={lists / 'lists'}",
        "Dir::Cache::pkgcache=",
        "Dir::Cache::srcpkgcache=",
        "APT::Sandbox::User=root",
    ]
    apt = ["apt-get", *(word for option in options for word in ("-o", option)), "-qq"]
    _run([*apt, "update"])
    _run([*apt, "download", *names], cwd=packages)
    shutil.rmtree(lists)


def _mirror() -> str:
    """The package server that this machine already uses."""
    shown = _run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    ).stdout.split()
    mirrors = [line for line in shown if "security" not in line]
    if not mirrors:
        raise RuntimeError("apt knows no package server; run apt-get update first")
    return mirrors[0]


def _relocate(prefix: Path) -> None:
    # The command looks for its configuration in usr/etc, the starter in usr/lib/etc.
    (prefix / "etc").rename(prefix / "usr" / "etc")
    (prefix / "usr/var/lib/apptainer/mnt/session").mkdir(parents=True)
    for name in ("etc", "var"):
        (prefix / "usr/lib" / name).symlink_to(Path("..", name))
    libc = prefix / "glibc" / _LIBRARIES
    for program in (binary(prefix), prefix / _LIBRARIES / "apptainer/bin/starter"):
        _run(
            [
                "patchelf",
                "--set-interpreter",
                str(libc / "ld-linux-x86-64.so.2"),
                "--force-rpath",
                "--set-rpath",
                f"{libc}:/{_LIBRARIES}",
                str(program),
            ]
        )


def _allow_our_root(prefix: Path) -> None:
    """Where root lacks a capability, asking for all of them fails: ask for those it has."""
    settings = prefix / "usr/etc/apptainer/apptainer.conf"
    lines = [
        "root default capabilities = file" if line.startswith("root default capab") else line
        for line in settings.read_text().splitlines()
    ]
    settings.write_text("\n".join(lines) + "\n")
    status = Path("/proc/self/status").read_text()
    permitted = next(line.split()[1] for line in status.splitlines() if line.startswith("CapPrm"))
    names = _run(["capsh", f"--decode={permitted}"]).stdout.strip().rpartition("=")[2].upper()
    _run([str(binary(prefix)), "capability", "add", "--user", "root", names])


def _run(
    command: list[str], *, cwd: Path | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} … failed: {done.stderr.strip()[-500:]}")
    return done


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        sys.exit(f"no Apptainer here: {reason}")
    print(f"export PATH={directory()}:$PATH")
