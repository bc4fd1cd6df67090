"""How does a run enter its container, and what does it find inside?"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from rlprobe.config import ContainerSection
from rlprobe.doctor import software
from rlprobe.errors import ConfigError, RunError
from rlprobe.runs import containers, devices, nodelocal

JOB = "77.5"
LOCAL = "/tmp/rlprobe-77.5"
NONE = ContainerSection()
APPTAINER = ContainerSection(runtime="apptainer", image="img.sif", args=("--nv",))
DOCKER = ContainerSection(runtime="docker", image="registry/verl:1", args=("--shm-size", "8g"))
PYXIS = ContainerSection(runtime="pyxis", image="registry#verl:1")


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a working directory, one model and no Slurm job."""
    work, model = tmp_path / "work", tmp_path / "model"
    work.mkdir()
    model.mkdir()
    monkeypatch.chdir(work)
    for name in (
        "SLURMD_NODENAME",
        "SLURM_CPUS_PER_TASK",
        "SLURM_CPUS_ON_NODE",
        nodelocal.BASE_ENV,
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def ascend(host: Path, monkeypatch: pytest.MonkeyPatch) -> devices.Device:
    """The same host with two NPUs and a driver."""
    dev = host / "dev"
    dev.mkdir()
    nodes = [dev / name for name in ("davinci10", "davinci2", "davinci_manager")]
    for node in nodes:
        node.touch()
    driver = host / "driver"
    driver.mkdir()
    row = dataclasses.replace(
        devices.get("npu"),
        control_nodes=(str(nodes[2]), str(dev / "absent")),
        host_paths=(str(driver), str(host / "no-such-path")),
    )
    monkeypatch.setitem(devices.DEVICES, "npu", row)
    found = devices.device_nodes
    monkeypatch.setattr(devices, "device_nodes", lambda kind: found(kind, dev))
    return row


def wrap(container: ContainerSection, device: str = "cpu", **options: object) -> list[str]:
    given = {
        "argv": ["python", "-m", "framework"],
        "env": {"SEED": "a b,c"},
        "binds": [],
        "scratch": Path.cwd() / "scratch",
        **options,
    }
    Path(str(given["scratch"])).mkdir(exist_ok=True)
    return containers.wrap(
        given["argv"],  # type: ignore[arg-type]
        given["env"],  # type: ignore[arg-type]
        container,
        device,
        given["binds"],  # type: ignore[arg-type]
        JOB,
        given["scratch"],  # type: ignore[arg-type]
        node=given.get("node"),  # type: ignore[arg-type]
    )


def values(argv: list[str], option: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == option]


def test_without_a_container_the_command_runs_under_exactly_the_declared_variables() -> None:
    argv = wrap(NONE)
    assert argv[0] == "/usr/bin/env"
    assert argv[-3:] == ["python", "-m", "framework"]
    assert "SEED=a b,c" in argv
    assert f"RAY_TMPDIR={LOCAL}/tmp" in argv
    assert "HF_HUB_OFFLINE=1" in argv
    assert not any(word.startswith("HOME=") for word in argv)


def test_a_declared_variable_wins_over_a_default() -> None:
    argv = wrap(NONE, env={"HF_HUB_OFFLINE": "0"})
    assert [w for w in argv if w.startswith("HF_HUB_OFFLINE=")] == ["HF_HUB_OFFLINE=0"]


def test_the_command_line_really_delivers_environment_and_arguments() -> None:
    argv = wrap(NONE, argv=["python3", "-c", "import os; print(os.environ['SEED'], os.getcwd())"])
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == f"a b,c {Path.cwd()}\n"


def test_apptainer_is_closed_to_the_host_but_for_what_is_bound(host: Path) -> None:
    argv = wrap(APPTAINER, binds=[host / "model"])
    assert argv[:3] == ["apptainer", "--quiet", "exec"]
    for option in ("--cleanenv", "--contain", "--ipc", "--pid"):
        assert option in argv
    work = str(Path.cwd())
    binds = values(argv, "--bind")
    assert binds[0] == f"{LOCAL}/tmp:/tmp"
    assert f"{work}:{work}" in binds
    assert f"{host}/model:{host}/model" in binds
    assert any(b.endswith(":/opt/rlprobe/host/rlprobe:ro") for b in binds)
    assert values(argv, "--pwd") == [work]
    # The site's own arguments come last before the image, so that they can overrule ours.
    assert argv[argv.index("img.sif") - 1] == "--nv"


def test_a_path_inside_a_bound_one_is_not_bound_again(host: Path) -> None:
    binds = values(wrap(APPTAINER, binds=["."]), "--bind")
    assert len([b for b in binds if b.startswith(str(host))]) == 1


def test_a_model_made_of_links_brings_what_they_point_to(host: Path) -> None:
    blobs, snapshot = host / "blobs", host / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    (blobs / "0123").touch()
    (snapshot / "model.safetensors").symlink_to("../blobs/0123")
    binds = values(wrap(APPTAINER, binds=[snapshot]), "--bind")
    assert f"{blobs}:{blobs}" in binds


def test_a_cuda_container_sees_the_gpus_that_the_job_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    argv = wrap(ContainerSection(runtime="apptainer", image="i.sif"), "cuda")
    assert "--nv" in argv
    assert "CUDA_VISIBLE_DEVICES=2,3" in argv
    argv = wrap(DOCKER, "cuda")
    assert values(argv, "--gpus") == ["all"]
    assert "CUDA_VISIBLE_DEVICES=2,3" in argv


def test_ascend_containers_get_driver_devices_and_the_image_s_set_env(
    host: Path, ascend: devices.Device
) -> None:
    argv = wrap(ContainerSection(runtime="apptainer", image="i.sif"), "npu")
    binds = values(argv, "--bind")
    assert f"{host}/driver:{host}/driver:ro" in binds
    assert not any("no-such-path" in b for b in binds)
    nodes = [b for b in binds if b.startswith(f"{host}/dev/")]
    # In numeric order: davinci10 comes after davinci2.
    assert nodes == [f"{host}/dev/{n}" for n in ("davinci2", "davinci10", "davinci_manager")]
    script = argv[argv.index("-c") + 1]
    assert "/usr/local/Ascend/cann/set_env.sh" in script
    assert script.index("ascend-toolkit/set_env.sh") < script.index("nnal/atb/set_env.sh")
    assert any(w.startswith("ASCEND_PROCESS_LOG_PATH=") and "/scratch/" in w for w in argv)


def test_docker_runs_as_the_user_and_can_be_found_again(host: Path, ascend: devices.Device) -> None:
    argv = wrap(DOCKER, "npu")
    assert argv[:3] == ["docker", "run", "--rm"]
    assert values(argv, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert values(argv, "--label") == [f"rlprobe.job={JOB}"]
    assert values(argv, "--network") == ["host"]
    assert f"{host}/dev/davinci2" in values(argv, "--device")
    assert values(argv, "--volume")[:2] == [f"{LOCAL}/tmp:/tmp", f"{LOCAL}/home:/home/rlprobe"]
    assert "HOME=/home/rlprobe" in argv
    assert values(argv, "--shm-size") == ["64g", "8g"]
    image = argv.index("registry/verl:1")
    assert argv[image - 2 : image] == ["--entrypoint", "/bin/bash"]


def test_pyxis_is_one_srun_on_the_wanted_node(ascend: devices.Device) -> None:
    argv = wrap(PYXIS, "npu", node="n2")
    assert argv.count("srun") == 1
    assert "--nodelist=n2" in argv
    assert "--overlap" in argv
    assert "--container-image=registry#verl:1" in argv
    mounts = next(w for w in argv if w.startswith("--container-mounts="))
    assert f"{LOCAL}/tmp:/tmp," in mounts
    assert "davinci2:" in mounts


@pytest.mark.parametrize(
    ("site", "exported"), [({}, "NONE"), ({"ENROOT_CONFIG_PATH": "/site"}, "ENROOT_CONFIG_PATH")]
)
def test_pyxis_hands_on_no_variable_of_the_shell(
    site: dict[str, str], exported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("ENROOT_", "PYXIS_"))]:
        monkeypatch.delenv(name)
    for name, value in {"OMP_NUM_THREADS": "3", **site}.items():
        monkeypatch.setenv(name, value)
    argv = wrap(PYXIS)
    assert [word for word in argv if word.startswith("--export")] == [f"--export={exported}"]
    # what is declared comes after it, in the container
    assert argv.index(f"--export={exported}") < argv.index("SEED=a b,c")


def test_other_runtimes_reach_another_node_through_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    outside = wrap(APPTAINER, node="n2")
    outside = outside[: outside.index("apptainer")]
    assert outside.count("srun") == 1
    assert {"--nodelist=n2", "--cpus-per-task=16"} <= set(outside)
    # What Slurm set for the whole job must not become this one step's request.
    assert "SLURM_MEM_PER_CPU" in values(outside, "-u")


def test_inside_a_container_rlprobe_is_the_host_s_and_the_image_s_path_is_kept() -> None:
    def pythonpath(**env: str) -> str:
        argv = wrap(DOCKER, argv=["sh", "-c", "echo $PYTHONPATH"], env=env)
        entry = [argv[argv.index("--entrypoint") + 1], *argv[argv.index("registry/verl:1") + 1 :]]
        image = {"PYTHONPATH": "/root/Megatron-LM", "PATH": os.environ["PATH"]}
        return subprocess.run(entry, env=image, capture_output=True, text=True, check=True).stdout

    assert pythonpath() == "/opt/rlprobe/host:/root/Megatron-LM\n"
    assert pythonpath(PYTHONPATH="/mine and") == "/opt/rlprobe/host:/mine and\n"


@pytest.mark.parametrize("loaded", [True, False])
def test_a_bare_ascend_environment_is_set_up_unless_the_site_did(
    host: Path, ascend: devices.Device, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    script = host / "set_env.sh"
    # As the vendor's: looks at its arguments, uses unset variables, prints.
    script.write_text('echo noise "$@"; export CANN_FROM="$1$UNSET"script\n')
    row = dataclasses.replace(
        ascend, set_env=(devices.SetEnv("ASCEND_TOOLKIT_HOME", ("/no/such", str(script))),)
    )
    monkeypatch.setitem(devices.DEVICES, "npu", row)
    environ = {"PATH": os.environ["PATH"], "CANN_FROM": "site"}
    if loaded:
        environ["ASCEND_TOOLKIT_HOME"] = "/opt/other-cann"
    argv = wrap(NONE, "npu", argv=["sh", "-c", 'echo "$CANN_FROM $1"', "sh", "kept"])
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    source = "site" if loaded else "/no/such" + "script"
    assert done.stdout == f"{source} kept\n"


def test_a_ray_setting_from_a_recipe_does_not_leak_in(monkeypatch: pytest.MonkeyPatch) -> None:
    name = devices.get("cuda").ray_noset
    assert name is not None
    argv = wrap(NONE, "cuda")
    assert values(argv, "-u") == [name]
    assert values(wrap(NONE, "cuda", env={name: "1"}), "-u") == []


def test_a_host_without_npus_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "device_nodes", lambda kind: [])
    with pytest.raises(RunError, match=r"no NPU on .*davinci"):
        wrap(APPTAINER, "npu")


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("/no/such/model", "does not exist"),
        ("/", "cannot be bound"),
        ("../with:colon", "cannot be bound"),
    ],
)
def test_paths_that_cannot_be_bound_are_refused(bind: str, message: str) -> None:
    Path("../with:colon").mkdir()
    with pytest.raises(ConfigError, match=message):
        wrap(APPTAINER, binds=[bind])


def test_only_this_job_s_docker_containers_are_stopped(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = host / "log"
    fake = host / "docker"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = ps ] && echo abc\nexit 0\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{host}:{os.environ['PATH']}")
    containers.stop(APPTAINER, JOB)
    assert not log.exists()
    containers.stop(DOCKER, JOB)
    assert log.read_text() == f"ps --quiet --filter label=rlprobe.job={JOB}\nrm --force abc\n"


def test_a_docker_daemon_that_is_down_is_said_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "docker"
    client.write_text(
        "#!/bin/sh\necho 'Cannot connect to the Docker daemon at unix:///x.sock. Is the docker "
        "daemon running?' >&2\nexit 1\n"
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    container = ContainerSection(runtime="docker", image="some/image:1")
    with pytest.raises(RunError, match=r"daemon does not answer.*systemctl start docker"):
        containers.stop(container, "1")
    item, _ = software._docker("target.container.image", "some/image:1")
    assert item.state == "fail" and "does not answer" in item.found
