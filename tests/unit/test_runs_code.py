"""Does a run's key say which code it runs?"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlprobe.capture import code
from rlprobe.config import ContainerSection, parse
from rlprobe.runs import code as runs_code
from rlprobe.runs import containers
from rlprobe.runs.plan import plan
from rlprobe.store import keys


def _package(place: Path, name: str = "verl", text: str = "x = 1\n") -> Path:
    made = place / name
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(text)
    (made / "config.yaml").write_text("a: 1\n")
    return made


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "__init__.py").write_text("x = 2\n"),
        lambda p: (p / "config.yaml").write_text("a: 2\n"),
        lambda p: (p / "more.py").write_text(""),
        lambda p: (p / "__init__.py").rename(p / "other.py"),
        lambda p: (p / "config.yaml").unlink(),
    ],
)
def test_every_change_of_code_is_another_digest(tmp_path: Path, change: Any) -> None:
    package = _package(tmp_path)
    before = code.digest(package)
    change(package)
    assert code.digest(package) not in (None, before)


@pytest.mark.parametrize("linked", ["package", "folder", "file"])
def test_code_that_is_linked_in_counts(tmp_path: Path, linked: str) -> None:
    """A checkout on PYTHONPATH may be put together of links."""
    inner = _package(tmp_path / "fork", "trainer")
    place = tmp_path / "path" / "verl"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    if linked == "package":
        (place / "trainer").symlink_to(inner)
    elif linked == "folder":
        # a package's folder of configuration has no __init__.py
        (inner / "__init__.py").rename(inner / "default.yaml")
        (place / "config").symlink_to(inner)
    else:
        (place / "more.yaml").symlink_to(inner / "config.yaml")
    before = code.digest(tmp_path / "path")
    (inner / "config.yaml").write_text("a: 2\n")
    assert code.digest(tmp_path / "path") not in (None, before)


def test_links_that_lead_back_or_to_data_are_not_followed(tmp_path: Path) -> None:
    package = _package(tmp_path)
    before = code.digest(tmp_path)
    (package / "again").symlink_to(tmp_path)
    data = tmp_path.parent / f"{tmp_path.name}-data"
    data.mkdir()
    (data / "prompts.json").write_text("{}")
    (tmp_path / "data").symlink_to(data)
    assert code.digest(tmp_path) == before


@pytest.mark.parametrize("name", ["__pycache__/a.py", ".git/hook.py", "weights.bin", "README.md"])
def test_what_is_no_code_changes_nothing(tmp_path: Path, name: str) -> None:
    package = _package(tmp_path)
    before = code.digest(package)
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_text("anything")
    assert code.digest(package) == before


def test_rlprobes_own_hooks_do_not_count(tmp_path: Path) -> None:
    _package(tmp_path)
    before = code.digest(tmp_path)
    _package(tmp_path, "rlprobe")
    assert code.digest(tmp_path) == before
    assert code.digest(tmp_path / "nothing") is None


def _installed(site: Path, *, direct: bool = False) -> metadata.Distribution:
    package = _package(site)
    info = site / "verl-0.9.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.9.1\n")
    rows = []
    for file in sorted(package.iterdir()):
        content = file.read_bytes()
        told = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"verl/{file.name},sha256={told},{len(content)}\n")
    (info / "RECORD").write_text("".join(rows))
    if direct:
        (info / "direct_url.json").write_text('{"url": "file:///home/me/fork"}')
    (found,) = metadata.distributions(path=[str(site)])
    return found


def test_an_install_from_an_index_is_its_version(tmp_path: Path) -> None:
    assert code.untouched(_installed(tmp_path))


def test_a_local_install_and_an_edited_one_are_not(tmp_path: Path) -> None:
    assert not code.untouched(_installed(tmp_path / "fork", direct=True))
    edited = _installed(tmp_path / "edited")
    (tmp_path / "edited/verl/__init__.py").write_text("x = 2\n")
    assert not code.untouched(edited)
    gone = _installed(tmp_path / "gone")
    (tmp_path / "gone/verl/config.yaml").unlink()
    assert not code.untouched(gone)


def test_the_installed_framework_is_looked_at() -> None:
    pytest.importorskip("verl")
    distribution = metadata.distribution("verl")
    if distribution.read_text("direct_url.json") is None:
        assert code.untouched(distribution)


def _alignment(**target: Any) -> Any:
    return parse(
        {
            "name": "n", "framework": "verl", "framework_version": "0.9.1",
            "model": {"path": "builtin:tiny-qwen2"}, "data": {"train_files": "builtin:arithmetic"},
            "target": target,
        },
        "test",
    )  # fmt: skip


def test_an_edited_fork_on_the_path_makes_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = _package(tmp_path / "fork")
    plain = plan(_alignment(), {})
    assert "code" not in plain["target"].declared(), "an index's own package needs no digest"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/fork")
    first = plan(_alignment(), {})
    assert first["target"].key != plain["target"].key
    (fork / "__init__.py").write_text("x = 'fixed'\n")
    second = plan(_alignment(), {})
    assert second["target"].key != first["target"].key
    assert second["benchmark"].key != first["benchmark"].key, "it imports the same fork"
    assert plan(_alignment(), {})["target"].key == second["target"].key


def test_a_path_of_one_side_is_that_sides(tmp_path: Path) -> None:
    _package(tmp_path / "mine", "recipe")
    alignment = _alignment(environment={"PYTHONPATH": f"{tmp_path}/mine:/no/such/place"})
    before = plan(alignment, {})
    (tmp_path / "mine/recipe/__init__.py").write_text("x = 2\n")
    after = plan(alignment, {})
    assert before["target"].key != after["target"].key
    assert before["benchmark"].key == after["benchmark"].key
    assert set(after["target"].declared()["code"]) == {"PYTHONPATH[0]"}


def test_in_an_image_only_what_the_host_has_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(tmp_path / "fork")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/fork")
    alignment = _alignment(container={"runtime": "docker", "image": "x/y:z"})
    assert runs_code.of("verl", alignment.target, None) == {}


def test_a_process_records_what_it_imported(tmp_path: Path) -> None:
    _package(tmp_path / "fork")
    _package(tmp_path / "fork", "helper")
    program = (
        "import json, verl, helper, numpy, yaml\n"
        "from rlprobe.capture import code\nprint(json.dumps(code.imported()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/fork:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=True,
    )
    import json

    found = json.loads(done.stdout)
    assert found == {name: code.digest(tmp_path / "fork" / name) for name in ("helper", "verl")}


def test_keys_that_differ_say_why() -> None:
    first = plan(_alignment(), {})["target"].declared()
    changed = _alignment(environment={"OMP_NUM_THREADS": "2"}, overrides=["algorithm.gamma=0.9"])
    second = plan(changed, {})["target"].declared()
    assert keys.differing(first, second) == {
        "environment.OMP_NUM_THREADS": (None, "2"),
        "overrides: algorithm.gamma": (None, "0.9"),
    }
    assert keys.differing(first, first) == {}


@pytest.mark.parametrize(
    ("image", "found"), [("x/y:z", "sha256:1"), ("x/y@sha256:abc", None), ("gone:z", None)]
)
def test_what_a_tag_stands_for_is_asked_of_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, found: str | None
) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\ncase "$*" in *gone*) exit 1;; esac\necho sha256:1\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert containers.image_id(ContainerSection(runtime="docker", image=image)) == found
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert containers.image_id(ContainerSection(runtime="docker", image=image)) is None
