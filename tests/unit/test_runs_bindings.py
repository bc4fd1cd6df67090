"""Does a container get every path that a run's options and variables name?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlprobe.config import parse
from rlprobe.runs import bindings
from rlprobe.runs.plan import plan


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("/a/model", ["/a/model"]),
        ("[/a/x.parquet,/b/y.parquet]", ["/a/x.parquet", "/b/y.parquet"]),
        ("{path:/a/b,name:x}", ["/a/b"]),
        ("/repo:/other/repo", ["/repo", "/other/repo"]),
        ("'/with/quotes'", ["/with/quotes"]),
        ("--load=/ckpt/iter_1", ["/ckpt/iter_1"]),
        ("http://head:8265/api", []),
        ("s3://bucket/key", []),
        ("relative/path", []),
        ("./here/there", []),
        ("${oc.env:HOME}/models", []),
        ("1e-3", []),
        ("a/b", []),
        ("--load /ckpt --save /out/dir", ["/ckpt", "/out/dir"]),
    ],
)
def test_paths_in_a_value(value: str, found: list[str]) -> None:
    assert bindings.in_text(value) == found


def _spec(root: Path, **raw: Any) -> Any:
    alignment = {
        "name": "n", "framework": "verl", "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2"}, "data": {"train_files": "builtin:arithmetic"},
        **raw,
    }  # fmt: skip
    return plan(parse(alignment, "test"), {})["target"]


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path_factory.mktemp("site")
    # pytest's directories are below /tmp, which is an image's own
    monkeypatch.setattr(bindings, "_OF_THE_IMAGE", (Path("/usr"), Path("/etc")))
    return made


def test_options_and_variables_are_looked_through(root: Path) -> None:
    for name in ("ckpt", "recipe", "adapter", "out"):
        (root / name).mkdir()
    spec = _spec(
        root,
        overrides=[
            f"+actor_rollout_ref.actor.load={root}/ckpt",
            f"+lora.adapters=[{root}/adapter,/usr/lib]",
            f"trainer.rollout_data_dir={root}/out/not-made-yet",
            "+x.y=/no/such/place/here",
        ],
        target={"environment": {"PYTHONPATH": f"{root}/recipe:/usr/lib/python3"}},
    )
    found = set(bindings.paths(spec))
    assert found == {f"{root}/{name}" for name in ("ckpt", "recipe", "adapter", "out")}


def test_an_entry_point_of_ones_own_is_bound(root: Path) -> None:
    (root / "main.py").write_text("import hydra\n")
    (root / "config").mkdir()
    (root / "config/mine.yaml").write_text("a: 1\n")
    spec = _spec(root, entry_point={"script": f"{root}/main.py", "config_path": f"{root}/config"})
    assert {str(root), f"{root}/config"} <= set(bindings.paths(spec))


def test_what_an_image_has_itself_is_left_to_it() -> None:
    spec = _spec(Path("/"), overrides=["+a.b=/usr/bin", "+c.d=/", "+e.f=/etc/hosts"])
    assert list(bindings.paths(spec)) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{tmp}", "a /tmp of its own"),
        ("[/usr/lib,{tmp}/more.json]", "a /tmp of its own"),
        ("~/ckpt", "another home"),
        ("[~/ckpt/iter_1,/usr/lib]", "another home"),
        ("/usr/lib", None),
        ("/tmp/no-such-file-yet", None),
        ("a~/b", None),
        ("http://host/~/x", None),
    ],
)
def test_a_path_that_leads_elsewhere_in_a_container_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str, said: str | None
) -> None:
    if not tmp_path.is_relative_to("/tmp"):
        pytest.skip(f"pytest's own directories are in {tmp_path}, not in /tmp")
    (tmp_path / "more.json").touch()
    option = f"+x.y={value.format(tmp=tmp_path)}"
    for runtime, told in (("docker", said), ("none", None)):
        container = {"runtime": runtime, **({"image": "a:b"} if runtime == "docker" else {})}
        caplog.clear()
        list(bindings.paths(_spec(tmp_path, overrides=[option], target={"container": container})))
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warned) == (told is not None), warned
        if told is not None:
            assert told in warned[0]
            assert "+x.y names" in warned[0]
