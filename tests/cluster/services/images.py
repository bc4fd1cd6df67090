"""The project's images, built here from a local base instead of a registry's.

    python -m services.images NAME…       builds them and prints their paths

The same .def files build on a cluster from their registry bases; only BOOTSTRAP and BASE differ.
What was built is kept in the cache directory and built again when its definition, an install
script or a lock changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from services import apptainer

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("RLPROBE_TEST_CACHE", "/var/tmp/rlprobe-test"))
#: Images that are really built and run here; the others need a vendor's base.
BUILT = ("verl-cpu", "compare", "slime-cpu")
_BASE_PACKAGES = ("python3", "python3-venv", "procps", "libgomp1")
#: What goes into an image besides install scripts and rlprobe.
_CONTENT = {
    "verl-cpu": ("requirements/lock.txt",),
    "compare": ("containers/requirements/compare.txt",),
    "slime-cpu": ("requirements/lock.txt", "tests/slime/standin"),
}
#: The set of wheels of an image that has none of its own.
_WHEELS = {"slime-cpu": "verl-cpu"}
#: Quick to write; an image for keeps is built with the default.
_SQUASH = "-comp zstd -Xcompression-level 1"


def why_not() -> str | None:
    """Why images cannot be built here; None if they can."""
    if os.geteuid() != 0:
        return "needs root, to make a base root file system"
    return apptainer.why_not()


def build(name: str) -> Path:
    """The SIF of an image, built unless the cache holds it.

    Raises:
        RuntimeError: a step failed; the message ends with its output.
    """
    sif = CACHE / f"{name}-{_digest(name)}.sif"
    if sif.exists():
        return sif
    CACHE.mkdir(parents=True, exist_ok=True)
    for stale in CACHE.glob(f"{name}-*.sif"):
        stale.unlink()
    environment = {**os.environ, "PYTHON": sys.executable}
    _run(["containers/wheelhouse.sh", os.uname().machine, _WHEELS.get(name, name)], env=environment)
    base = _base()
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        unfinished = Path(temporary) / "image.sif"
        _run_as_full_root(
            [
                str(apptainer.directory() / "apptainer"),
                *("build", "--mksquashfs-args", _SQUASH),
                *("--build-arg", "BOOTSTRAP=localimage", "--build-arg", f"BASE={base}"),
                str(unfinished),
                f"containers/{name}.def",
            ],
            env={**os.environ, "APPTAINER_TMPDIR": temporary},
        )
        unfinished.rename(sif)
    return sif


def _digest(name: str) -> str:
    """Of everything that goes into an image but rlprobe, which the host's own stands in for."""
    files = [
        ROOT / f"containers/{name}.def",
        *(found for part in _CONTENT[name] for found in _files(ROOT / part)),
        *sorted((ROOT / "containers/install").iterdir()),
    ]
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _files(path: Path) -> list[Path]:
    below = (p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sorted(below) if path.is_dir() else [path]


def _base() -> Path:
    """A minimal Debian of this machine's release, as the registry's image of it."""
    rootfs = CACHE / "rootfs"
    if (rootfs / "etc/os-release").exists():
        return rootfs
    shutil.rmtree(rootfs, ignore_errors=True)
    if not shutil.which("mmdebstrap"):
        _run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "mmdebstrap"])
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        unfinished = Path(temporary) / "rootfs"
        _run(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                f"--include={','.join(_BASE_PACKAGES)}",
                "--dpkgopt=path-exclude=/usr/share/doc/*",
                "--dpkgopt=path-exclude=/usr/share/man/*",
                _release(),
                str(unfinished),
                *_sources(),
            ]
        )
        # Device nodes cannot be copied without a capability that this root may lack.
        shutil.rmtree(unfinished / "dev")
        (unfinished / "dev").mkdir()
        unfinished.rename(rootfs)
    return rootfs


def _release() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("VERSION_CODENAME"))


def _sources() -> Iterable[str]:
    """The sources this machine uses: its mirror is the one that can be reached."""
    shown = subprocess.run(
        [
            "apt-get",
            "indextargets",
            "--format",
            "deb $(REPO_URI) $(RELEASE) $(COMPONENT)",
            "Created-By: Packages",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted({line for line in shown.stdout.splitlines() if line.endswith(" main")})


def _lacks_capabilities() -> bool:
    status = Path("/proc/self/status").read_text().splitlines()
    permitted = next(int(line.split()[1], 16) for line in status if line.startswith("CapPrm"))
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    return permitted != (1 << (last + 1)) - 1


def _run_as_full_root(command: list[str], *, env: dict[str, str]) -> None:
    """Run as uid 0 of a new user namespace, which holds every capability.

    Apptainer's %post asks for all of them, and refuses a root that lacks one.
    """
    if not _lacks_capabilities():
        _run(command, env=env)
        return
    inside = 'read -r _ && exec setpriv --reuid=0 --regid=0 --clear-groups "$@" </dev/null'
    child = subprocess.Popen(
        ["unshare", "--user", "--mount", "bash", "-c", inside, "bash", *command],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    ours = Path("/proc/self/ns/user").readlink()
    theirs = Path(f"/proc/{child.pid}/ns/user")
    while child.poll() is None and theirs.readlink() == ours:
        time.sleep(0.01)
    for kind in ("gid", "uid"):
        # Every id keeps its number, so that files in the image belong to whom they should.
        Path(f"/proc/{child.pid}/{kind}_map").write_text("0 0 65536\n")
    output, _ = child.communicate("go\n")
    if child.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} … failed:\n{output[-3000:]}")


def _run(command: list[str], *, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} … failed:\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    reason = why_not()
    if reason is not None:
        sys.exit(f"no images here: {reason}")
    for wanted in sys.argv[1:] or BUILT:
        print(build(wanted))
