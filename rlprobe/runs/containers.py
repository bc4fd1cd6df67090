"""Command lines that enter a container: apptainer, docker, pyxis, or none.

A run starts on the host of its allocation and enters the image itself, because several nodes need
``srun`` from outside and because many NPU sites have docker or pyxis only. Whatever the runtime,
the process inside finds the same things: the working directory and the bound paths under their own
names, a /tmp and caches of its own job, exactly the declared environment, the devices and, on
Ascend, the driver of the host and the libraries of the image.

Images bring the framework. rlprobe itself is bound in from the host over the copy in the image, so
that the two ends of a run are never of different versions.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rlprobe
from rlprobe.config import ContainerSection
from rlprobe.errors import ConfigError, RunError
from rlprobe.runs import devices, nodelocal, slurm

#: Where the host's rlprobe lies inside a container.
_PACKAGE_ROOT = Path("/opt/rlprobe/host")
_TMP = Path("/tmp")
_HOME = Path("/home/rlprobe")
#: Marks docker containers, so that exactly one job's are stopped.
_LABEL = "rlprobe.job"
#: What divides the parts of a bind, and binds from each other, for every runtime.
_DIVIDING = (",", ":", "\n")


def bindable(path: Path) -> bool:
    """Whether a host path can be given to a container under its own name."""
    return path.is_absolute() and not any(sign in str(path) for sign in _DIVIDING)


@dataclass(frozen=True)
class Bind:
    """A host path visible in the container under the same or another name."""

    source: Path
    target: Path
    read_only: bool = False

    def __post_init__(self) -> None:
        for path in (self.source, self.target):
            if not bindable(path):
                raise ConfigError(
                    f"{path} cannot be bound into a container; accepted: an absolute path "
                    "without ',' and ':'"
                )

    def text(self, read_only: str = "ro") -> str:
        return f"{self.source}:{self.target}" + (f":{read_only}" if self.read_only else "")


def wrap(
    argv: Sequence[str],
    env: Mapping[str, str],
    container: ContainerSection,
    device: str,
    binds: Iterable[str | os.PathLike[str]],
    job_id: str,
    scratch: str | os.PathLike[str],
    *,
    node: str | None = None,
    step_name: str | None = None,
) -> list[str]:
    """The command line that runs ``argv`` in its container.

    The job's directories (:func:`rlprobe.runs.nodelocal.of_job`) must exist on the node when the
    command starts.

    Args:
        argv: the command as the container finds it (``python``, not this interpreter's path).
        env: everything the command shall find in its environment; it wins over what the image or
            the job's directories set.
        container: runtime, image, further arguments.
        device: cpu, cuda or npu.
        binds: further paths that the command reads or writes, bound under their own names. The
            working directory and ``scratch`` always are.
        job_id: :func:`rlprobe.runs.nodelocal.job_id`; keys caches, /tmp and docker's label.
        scratch: the run's scratch directory; Ascend's logs go to ``scratch/logs/ascend``.
        node: the node of the allocation to run on; None for this one.
        step_name: name of the Slurm step where one is made (another node, or pyxis).

    Raises:
        ConfigError: a path cannot be bound or is too long.
        RunError: there is no device of this kind on this host.
    """
    row = devices.get(device)
    local = nodelocal.of_job(job_id)
    scratch = Path(scratch).resolve()
    outside = slurm.srun([node], name=step_name) if node else []
    if container.runtime == "none":
        nodelocal.check_ray_path(local.tmp)
        inside = {
            **nodelocal.environment(local.tmp, local.home),
            **_logs(row, scratch),
            **env,
        }
        return [*outside, *_entry(argv, inside, row, contained=False)]
    paths = [Bind(path, path) for path in _distinct([Path.cwd(), scratch, *binds])]
    package = Path(rlprobe.__file__).parent
    paths += [
        Bind(package, _PACKAGE_ROOT / "rlprobe", read_only=True),
        # also under its own name: command lines made on the host name files in it
        Bind(package, package, read_only=True),
        *(Bind(Path(p), Path(p), read_only=True) for p in row.host_paths if Path(p).exists()),
    ]
    inside = {
        # docker's --user names an id that the image's passwd does not list.
        "HOME": str(_HOME),
        "USER": "rlprobe",
        "LOGNAME": "rlprobe",
        **nodelocal.environment(_TMP, _HOME),
        **_logs(row, scratch),
        **_visible(row),
        **env,
    }
    entry = _entry(argv, inside, row, contained=True)
    if container.runtime == "pyxis":
        step = slurm.srun([node] if node else [], name=step_name)
        return [*step, *_pyxis(container, row, paths, local), *entry]
    if container.runtime == "docker":
        return [*outside, *_docker(entry, container, row, paths, local, job_id)]
    return [*outside, *_apptainer(container, row, paths, local), *entry]


def stop(container: ContainerSection, job_id: str) -> None:
    """End what a killed command line leaves behind.

    A docker container outlives its client; the other runtimes' processes are the job's own.

    Raises:
        RunError: docker could not be asked, or refused.
    """
    if container.runtime != "docker":
        return
    listed = _docker_client("ps", "--quiet", "--filter", f"label={_LABEL}={job_id}")
    if listed.split():
        _docker_client("rm", "--force", *listed.split())


def image_id(container: ContainerSection) -> str | None:
    """What a docker tag stands for on this host just now; None where nothing here can say.

    A SIF file is part of the run's key by its content, and a reference with its digest says it
    itself; what apptainer or pyxis fetch is known to them alone.
    """
    if container.runtime != "docker" or "@sha256:" in str(container.image):
        return None
    try:
        done = subprocess.run(
            ["docker", "image", "inspect", "--format", "{{.Id}}", str(container.image)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _docker_client(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)
    said = done.stderr.strip()
    if done.returncode and re.search("(?i)docker daemon|docker.sock", said):
        raise RunError(
            f"docker's daemon does not answer on this machine ({said}); start it (systemctl start "
            "docker), or have your user join the group that may use it"
        )
    if done.returncode:
        raise RunError(f"docker {' '.join(arguments)} failed: {said}")
    return done.stdout


def _apptainer(
    container: ContainerSection,
    row: devices.Device,
    binds: list[Bind],
    local: nodelocal.NodeLocal,
) -> list[str]:
    # --cleanenv: a thread count in the user's shell would change numbers that nobody declared.
    # --pid: a killed run takes its Ray agents with it. --ipc: a /dev/shm of its own.
    command = ["apptainer", "--quiet", "exec", "--cleanenv", "--contain", "--ipc", "--pid"]
    command += ["--pwd", str(Path.cwd()), "--home", f"{local.home}:{_HOME}"]
    if row.kind == devices.CUDA:
        command.append("--nv")
    for bind in [Bind(local.tmp, _TMP), *binds]:
        command += ["--bind", bind.text()]
    for path in _nodes(row):
        command += ["--bind", path]
    return [*command, *container.args, str(container.image)]


def _docker(
    entry: list[str],
    container: ContainerSection,
    row: devices.Device,
    binds: list[Bind],
    local: nodelocal.NodeLocal,
    job_id: str,
) -> list[str]:
    command = ["docker", "run", "--rm", "--init", "--label", f"{_LABEL}={job_id}"]
    # Shared file systems map root to nobody: files are written by the user who started the run.
    command += ["--user", f"{os.getuid()}:{os.getgid()}", "--network", "host"]
    # Ray's object store and data loaders live in /dev/shm, whose default is 64 MB; it takes memory
    # only as it fills. RDMA needs locked memory.
    command += ["--shm-size", "64g", "--ulimit", "memlock=-1", "--workdir", str(Path.cwd())]
    if row.kind == devices.CUDA:
        command += ["--gpus", "all"]
    nodes = _nodes(row)
    for path in nodes:
        command += ["--device", path]
    for group in sorted({Path(path).stat().st_gid for path in nodes} - {os.getgid()}):
        command += ["--group-add", str(group)]
    tmp = Bind(local.tmp, _TMP)
    for bind in [tmp, Bind(local.home, _HOME), *binds]:
        command += ["--volume", bind.text()]
    return [*command, *container.args, "--entrypoint", entry[0], str(container.image), *entry[1:]]


def _pyxis(
    container: ContainerSection,
    row: devices.Device,
    binds: list[Bind],
    local: nodelocal.NodeLocal,
) -> list[str]:
    mounts = [Bind(local.tmp, _TMP), Bind(local.home, _HOME), *binds]
    texts = [bind.text() for bind in mounts] + [f"{path}:{path}" for path in _nodes(row)]
    command = [f"--container-image={container.image}", f"--container-workdir={Path.cwd()}"]
    command += ["--no-container-mount-home", "--no-container-entrypoint", _pyxis_exports()]
    return [*command, f"--container-mounts={','.join(texts)}", *container.args]


def _pyxis_exports(environ: Mapping[str, str] = os.environ) -> str:
    """Keeps the shell's variables out of the container, but for what enroot and pyxis go by.

    pyxis hands on whatever a step has (``--container-env`` in its ``args.c``), and a step has
    whatever the shell had. Slurm's own variables come with NONE as well.
    """
    kept = sorted(name for name in environ if name.startswith(("ENROOT_", "PYXIS_")))
    return f"--export={','.join(kept) or 'NONE'}"


def _entry(
    argv: Sequence[str], env: Mapping[str, str], row: devices.Device, *, contained: bool
) -> list[str]:
    """``argv`` under ``env``, after the vendor's set_env.sh where the device has one.

    Outside a container a script is left alone whose variable is set: the site may have loaded
    another CANN. Inside, the host's variables say nothing about the image.
    """
    env = dict(env)
    lines = []
    if row.set_env:
        # In a function the script sees no arguments of ours; on stderr it spoils nobody's output.
        lines.append('load() { for f; do if [ -f "$f" ]; then . "$f" >&2; return; fi; done; }')
    for script in row.set_env:
        call = f"load {shlex.join(script.scripts)}"
        lines.append(call if contained else f'[ -n "${{{script.variable}:-}}" ] || {call}')
    if contained:
        # Prepended: images keep Megatron there, and CANN its operator compiler.
        inherited = shlex.quote(env.pop("PYTHONPATH")) if "PYTHONPATH" in env else "$PYTHONPATH"
        lines.append(f"export PYTHONPATH={_PACKAGE_ROOT}:{inherited}")
    command = ["/usr/bin/env"]
    if row.ray_noset is not None and row.ray_noset not in env:
        command += ["-u", row.ray_noset]
    command += [*(f"{name}={value}" for name, value in sorted(env.items())), *argv]
    if not lines:
        return command
    return ["/bin/bash", "-c", "\n".join([*lines, 'exec "$@"']), "rlprobe", *command]


def _logs(row: devices.Device, scratch: Path) -> dict[str, str]:
    # Kept with the run's other logs: they say why a device failed.
    if row.kind != devices.NPU:
        return {}
    return {"ASCEND_PROCESS_LOG_PATH": str(scratch / "logs" / "ascend")}


def _visible(row: devices.Device) -> dict[str, str]:
    value = os.environ.get(row.visible) if row.visible else None
    return {} if value is None or row.visible is None else {row.visible: value}


def _nodes(row: devices.Device) -> list[str]:
    if row.kind != devices.NPU:
        return []
    present = devices.device_nodes(row.kind)
    if not present:
        raise RunError(
            f"no NPU on {os.uname().nodename}: /dev/{row.node_pattern} matches nothing; run on a "
            "node that has some (resources.partition), or set device"
        )
    return [*present, *(path for path in row.control_nodes if Path(path).exists())]


def _distinct(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The paths to bind, absolute under their own names, without those that lie in another."""
    found: list[Path] = []
    for path in paths:
        absolute = Path(os.path.normpath(Path.cwd() / Path(path).expanduser()))
        if not absolute.exists():
            raise ConfigError(
                f"{absolute} does not exist on {os.uname().nodename}; a container can only be "
                "given paths that every node of the job sees"
            )
        if absolute == Path("/"):
            raise ConfigError("/ cannot be bound into a container; name the directories needed")
        found += [absolute, *_linked(absolute)]
    unique = dict.fromkeys(found)
    return [path for path in unique if not any(other in path.parents for other in unique)]


def _linked(directory: Path) -> Iterable[Path]:
    """Where a directory's own files really lie.

    A model in Hugging Face's cache is a directory of links into another one.
    """
    if directory.is_dir():
        for entry in directory.iterdir():
            if entry.is_symlink() and entry.is_file():
                yield entry.resolve().parent
