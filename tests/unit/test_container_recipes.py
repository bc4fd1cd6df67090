"""Do the image recipes agree with one another, and do they leave a vendor's image as it was?"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CONTAINERS = Path(__file__).resolve().parents[2] / "containers"
IMAGES = (
    "verl-cpu",
    "verl-vllm-cpu",
    "verl-cuda",
    "verl-ascend",
    "slime-cpu",
    "slime-cuda",
    "slime-ascend",
    "compare",
)


def pins(path: Path) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line.count("==") == 1 and ";" not in line)


@pytest.mark.parametrize("name", IMAGES)
def test_both_recipes_of_an_image_use_one_script_base_and_check(name: str) -> None:
    definition = (CONTAINERS / f"{name}.def").read_text()
    dockerfile = (CONTAINERS / f"{name}.Dockerfile").read_text()
    for text in (definition, dockerfile):
        assert f"/opt/rlprobe/install/{name}.sh" in text
    base = re.search(r"BASE=(\S+)", definition)
    assert base is not None
    assert f"ARG BASE={base.group(1)}\n" in dockerfile
    # Pinned: what "latest" is today decides numbers that nobody could repeat.
    assert ":" in base.group(1)
    assert not base.group(1).endswith("latest")
    check = re.search(r"check\.sh .*", definition)
    assert check is not None
    assert check.group() in dockerfile
    assert (CONTAINERS / "install" / f"{name}.sh").stat().st_size > 0


def test_there_is_no_recipe_without_a_test() -> None:
    assert {path.stem for path in CONTAINERS.glob("*.def")} == set(IMAGES)
    assert {path.stem for path in CONTAINERS.glob("*.Dockerfile")} == set(IMAGES)


def test_the_compare_image_has_versions_of_the_one_lock() -> None:
    lock = pins(CONTAINERS.parent / "requirements/lock.txt")
    listed = pins(CONTAINERS / "requirements/compare.txt")
    assert listed
    assert {name: lock.get(name) for name in listed} == listed
    assert not {"torch", "verl", "ray", "mindstudio-probe"} & set(listed)


def test_nothing_that_a_vendor_tunes_is_ever_on_the_list_beside_it() -> None:
    listed = {name.lower() for name in pins(CONTAINERS / "requirements/beside.txt")}
    assert not {"torch", "torch_npu", "torch-npu", "numpy", "ray", "transformers"} & listed
    assert "mindstudio-probe" in listed


class Vendor:
    """An environment that stands in for a vendor's image: fake packages, real pip."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "image" / "bin" / "python"
        # pip is the outer Python's: to copy one in takes longer than the whole test.
        options = ["--without-pip", "--system-site-packages"]
        subprocess.run([sys.executable, "-m", "venv", *options, directory / "image"], check=True)
        (self.site,) = (directory / "image" / "lib").glob("python*/site-packages")
        for name, version in (("torch", "2.10.0"), ("torch_npu", "2.10.0.post4")):
            self.preinstall(name, version)
        self.preinstall("numpy", "1.26.4")
        self.preinstall("einops", "0.7.0")
        self.wheels = directory / "wheels"
        self.wheels.mkdir()
        shutil.copytree(CONTAINERS / "install", directory / "install")
        beside = shutil.copy(CONTAINERS / "requirements/beside.txt", directory / "install")
        for name, version in pins(Path(beside)).items():
            self.wheel(name, version)
        self.wheel("rlprobe", "0.1.0", {"rlprobe.pth": ""})
        # A wheelhouse may hold more than is asked for; it must not find its way in.
        self.wheel("numpy", "2.4.6")

    def preinstall(self, name: str, version: str) -> None:
        (self.site / f"{name}.py").write_text("")
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}.py,,\n")

    def wheel(self, name: str, version: str, files: dict[str, str] | None = None) -> None:
        plain = re.sub("[-.]+", "_", name)
        info = f"{plain}-{version}.dist-info"
        module = f"{plain.lower()}.py"
        members = {
            **({module: ""} if files is None else files),
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
            "Tag: py3-none-any\n",
        }
        record = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"])
        with zipfile.ZipFile(self.wheels / f"{plain}-{version}-py3-none-any.whl", "w") as archive:
            for member, text in {**members, f"{info}/RECORD": record}.items():
                archive.writestr(member, text)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "WHEELS": str(self.wheels),
            "PREFIX": str(self.directory / "notes"),
            "APPTAINER_LABELS": str(self.directory / "labels"),
        }
        return subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def version(self, name: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return self.run(str(self.python), "-c", code).stdout.strip()


@pytest.mark.slow
def test_a_vendor_s_image_gets_what_it_lacks_and_keeps_what_it_has(tmp_path: Path) -> None:
    vendor = Vendor(tmp_path)
    done = vendor.run("bash", "install/verl-ascend.sh")
    assert done.returncode == 0, done.stdout
    assert vendor.version("h5py") == pins(CONTAINERS / "requirements/beside.txt")["h5py"]
    assert vendor.version("rlprobe") == "0.1.0"
    # Neither another version that we would like better nor one that lies around.
    assert vendor.version("einops") == "0.7.0"
    assert vendor.version("numpy") == "1.26.4"
    assert "org.rlprobe.torch_npu 2.10.0.post4" in (tmp_path / "labels").read_text()

    checked = vendor.run("bash", "install/check.sh", "h5py", "rlprobe_missing")
    assert checked.returncode != 0
    assert "rlprobe_missing" in checked.stdout
    checked = vendor.run("bash", "install/check.sh", "h5py")
    assert checked.returncode == 0, checked.stdout
    assert "untouched: torch 2.10.0, torch-npu 2.10.0.post4, numpy 1.26.4" in checked.stdout

    (vendor.site / "numpy-1.26.4.dist-info/RECORD").write_text("numpy.py,,9\n")
    shutil.rmtree(vendor.site / "torch_npu-2.10.0.post4.dist-info")
    checked = vendor.run("bash", "install/check.sh")
    assert checked.returncode != 0
    assert "numpy 1.26.4 is now 1.26.4" in checked.stdout
    assert "torch-npu 2.10.0.post4 is now gone" in checked.stdout


def test_a_wheelhouse_is_fetched_for_the_other_architecture(root: Path, tmp_path: Path) -> None:
    """With a pip that only notes what it is asked for."""
    for name in ("containers", "requirements"):
        (tmp_path / name).symlink_to(root / name)
    noted = tmp_path / "noted"
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\ncase "$1" in -c) echo 3.11 ;; *) echo "$@" >> {noted} ;; esac\n')
    stub.chmod(0o755)
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    script = tmp_path / "wheelhouse.sh"
    text = (root / "containers/wheelhouse.sh").read_text(encoding="utf-8")
    script.write_text(text.replace('cd "$(dirname "$0")/.."', f"cd {tmp_path}"), encoding="utf-8")
    done = subprocess.run(
        ["bash", str(script), other],
        env={**os.environ, "PYTHON": str(stub)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked = [line for line in noted.read_text().splitlines() if f"manylinux_2_28_{other}" in line]
    assert [re.search(r"--python-version (\S+)", line).group(1) for line in asked] == [
        "3.11", "3.10", "3.11", "3.12",
    ]  # fmt: skip
    for name in ("compare", "beside"):
        assert any(f"wheelhouse/{other}/{name} " in line for line in asked)
        assert (tmp_path / f"wheelhouse/{other}/{name}.stamp").is_file()
