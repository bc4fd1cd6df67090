"""What does the doctor say on a laptop, and does every failure come with what to do?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlprobe.cli import main
from rlprobe.config import ContainerSection, load
from rlprobe.doctor import examine, item, node, size, software, storage
from rlprobe.doctor.item import Item
from rlprobe.stages import FORCED, STAGES, TEACHER

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")

    def write(**changes: Any) -> Path:
        raw = yaml.safe_load((ROOT / "config/config.yaml").read_text()) | changes
        (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
        return tmp_path / "a.yaml"

    return write


def by_name(items: list[Item]) -> dict[str, Item]:
    return {item.name: item for item in items}


def test_a_laptop_is_well(config: Callable[..., Path]) -> None:
    items = list(examine(config()))
    assert not [item for item in items if item.state == "fail"]
    found = by_name(items)
    assert found["slurm"].state == "skip"
    assert found["store hard links"].state == "ok"
    assert "verl 0.9.1" in {i.found for i in items if i.name == "target environment"}


@pytest.mark.slow
def test_a_side_on_this_machine_is_entered_and_tried(config: Callable[..., Path]) -> None:
    """Real imports, a product and a collective of two processes; and a device that is not here."""
    pytest.importorskip("verl")
    items = list(examine(config(target={"device": "npu"}, framework_version="0.8.0"), tried=True))
    found = by_name(items)
    for name, answer in {
        "benchmark import msprobe": "26.",
        "benchmark import ray": "2.",
        "benchmark product": "64x64 in fp32 is right",
        "benchmark collective": "all-reduce over 1 process by gloo is right",
    }.items():
        assert found[name].state == "ok", found[name]
        assert answer in found[name].found
    assert found["benchmark import verl"].state == "fail", "the alignment names another version"
    assert found["target devices"].state == "fail"
    assert "davinci" in found["target devices"].found
    assert "target import torch_npu" not in found, "nothing is started without the device"
    assert found["target imports, product and collective"].state == "skip"


@pytest.mark.parametrize("side", ["benchmark", "target"])
def test_a_site_that_makes_one_side_alone_is_asked_for_that_alone(
    config: Callable[..., Path], side: str
) -> None:
    """The other side has to be described, and is no business of this machine's."""
    other = {"benchmark": "target", "target": "benchmark"}[side]
    elsewhere = {
        "device": "npu",
        "precision": "bf16",
        "resources": {"partition": "no-such", "exclusive": True},
    }
    changes = {other: elsewhere, "ray": True, "capture": {"engine": "light"}}
    path = config(**changes, analysis={"image": "images/none.sif"})
    found = list(examine(path, side=side, tried=False))
    assert not [item for item in found if item.state == "fail"], found
    assert any(item.name.startswith(f"{side} ") for item in found)
    everything = list(examine(path))
    assert {item.name.split(" ")[0] for item in everything} >= {"benchmark", "target"}
    assert [item for item in everything if item.state == "fail"]


def test_what_an_environment_lacks_is_an_answer() -> None:
    from rlprobe.capture import probe

    pytest.importorskip("torch")
    names = {check["name"]: check for check in probe.checks("npu", "slime", 2, "bf16")}
    assert "torch_npu" in names["import torch_npu"]["found"]
    assert not names["import torch_npu"]["ok"]
    assert "No module named 'slime'" in names["import slime"]["found"]
    assert "product" not in names, "questions that rest on one that failed are not asked"


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from rlprobe.capture import probe

    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: real(*a, **k) * 1.5)
    with pytest.raises(RuntimeError, match="ones times ones in fp32 is 144"):
        probe._product("cpu", "fp32")


def test_every_failure_says_what_to_do(config: Callable[..., Path]) -> None:
    items = list(
        examine(
            config(
                framework_version="0.8.0",
                target={"container": {"runtime": "apptainer", "image": "images/none.sif"}},
            )
        )
    )
    failed = [item for item in items if item.state == "fail"]
    assert {item.name for item in failed} == {"target.container.image", "benchmark environment"}
    assert all(item.action for item in failed)
    assert "verl is 0.9.1, framework_version says 0.8.0" in {item.found for item in failed}


@pytest.mark.parametrize(
    ("setup", "state", "said"),
    [
        ('version="0.2.3"', "fail", "slime is 0.2.3, framework_version says 0.2.2"),
        ('version="0.2.2"', "ok", "slime 0.2.2"),
        ("", "warn", "slime (of unknown version): framework_version 0.2.2 is not checked"),
        (None, "fail", "slime is not in it"),
    ],
)
def test_slimes_checkout_is_held_against_its_sides_version(
    config: Callable[..., Path], tmp_path: Path, setup: str | None, state: str, said: str
) -> None:
    """Each side has its own; the distribution called slime is another project."""
    checkout = tmp_path / "slime"
    if setup is not None:
        checkout.mkdir()
        (checkout / "setup.py").write_text(f"setup(\n    {setup},\n)\n")
    side = {"environment": {"RLPROBE_SLIME": str(checkout)}, "framework_version": "0.2.2"}
    path = config(
        framework="slime", framework_version="0.3.1", overrides=[], target=side, ray=True,
        model={"path": str(tmp_path)}, data={"train_files": str(tmp_path)},
    )  # fmt: skip
    found = [
        item for item in software.look(load(path), ("target",)) if item.name == "target environment"
    ]
    assert (found[0].state, found[0].found) == (state, said)
    assert state == "ok" or found[0].action


def test_a_directory_that_msprobe_refuses_is_found_before_the_first_dump(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config()
    spaced = tmp_path / "my work"
    spaced.mkdir()
    (spaced / "requirements").symlink_to(ROOT / "requirements")
    monkeypatch.chdir(spaced)
    found = by_name(list(examine(path)))
    assert found["store path"].state == "fail"
    assert "msprobe refuses" in found["store path"].found


def test_a_file_system_without_hard_links_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    item = storage.hard_link(tmp_path)
    assert item.state == "warn"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_or_inode_table_too_small_is_a_failure(tmp_path: Path) -> None:
    items = by_name(list(storage.space(tmp_path, size.Size(bytes=1 << 60, files=1 << 60))))
    assert items["store space"].state == "fail"
    assert items["store inodes"].state == "fail"
    assert all(i.state == "ok" for i in storage.space(tmp_path, size.Size(bytes=1, files=1)))


def test_the_versions_in_an_image_are_read_from_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"org.rlprobe.verl": "0.9.1", "other": "1"}
    answer = json.dumps({"data": {"attributes": {"labels": labels}}})
    fake = tmp_path / "apptainer"
    fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
    fake.chmod(0o755)
    image = tmp_path / "i.sif"
    image.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    item, versions = software._exists(
        "target.container.image", ContainerSection(runtime="apptainer", image=str(image))
    )
    assert item.state == "ok"
    assert versions == {"verl": "0.9.1"}


@pytest.mark.slow
def test_the_command_prints_a_line_an_item_and_fails_with_them(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wrong = str(config(framework_version="0.1"))
    assert main(["doctor", "--config", wrong, "--json", "d.json"]) == 1
    said = capsys.readouterr().out
    assert "; do: " in said
    lines = said.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "skip", "fail") for line in lines)
    assert len(lines) == len(json.loads((tmp_path / "d.json").read_text())["items"])


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"resume_from": "no/such/step"}, ["resume_from: no/such/step does not exist"]),
        (
            {
                "model": {"path": "no/model"},
                "data": {"train_files": "no/a.parquet", "val_files": "no/b.parquet"},
            },
            ["model.path: no/model", "data.train_files: no/a.parquet", "data.val_files: no/b.par"],
        ),
        # verl's own check counts its problems too
        (
            {"overrides": ["trainer.no_such=1", "trainer.nor_this=2"]},
            [f"overrides: verl 0.9.1 has no trainer.{key}" for key in ("no_such", "nor_this")],
        ),
    ],
)
def test_each_problem_of_a_configuration_is_an_item_with_what_to_do(
    config: Callable[..., Path], wrong: dict[str, Any], found: list[str]
) -> None:
    path = config(**wrong)
    items = [each for each in examine(path) if each.name == "configuration"]
    assert {(each.state, each.action) for each in items} == {("fail", f"correct {path}")}
    assert len(items) == len(found)
    for each, expected in zip(items, found, strict=True):
        assert each.found.startswith(expected)
        assert "\n" not in each.line()


@pytest.mark.parametrize("store", ["/proc/none/store", "/sys/kernel/store"])
def test_a_store_that_cannot_be_begun_is_an_item_and_no_traceback(
    config: Callable[..., Path], store: str
) -> None:
    items = list(examine(config(store=store), on_cluster=True))
    (found,) = [each for each in items if each.name == "shared storage"]
    assert found.state == "fail" and "the nodes are not looked at" in found.found
    assert found.action == f"make {store} on a file system that every partition mounts"


def test_a_container_is_tried_though_nothing_of_the_stores_path_is_there(tmp_path: Path) -> None:
    assert node._given(Path("/")) == Path.cwd()
    assert node._given(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ("one", "one; do: mend it"),
        ("one\ntwo\n", "one; two; do: mend it"),
        ("2 errors:\n\n  one\n  two.\n  three", "2 errors: one; two. three; do: mend it"),
        ("", "; do: mend it"),
    ],
)
def test_an_item_is_one_line_whatever_another_program_said(found: str, line: str) -> None:
    assert item.fail("a", found, "mend it").line() == f"fail a: {line}"
    assert item.fail("a", found, "mend it").to_dict()["found"] == found


def test_a_slurm_that_does_not_answer_is_one_line(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin/sinfo"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\nprintf 'sinfo: error: no host\\nsinfo: fatal: no source\\n' >&2; exit 1"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    (found,) = [
        i for i in examine(config(target={"resources": {"partition": "npu"}})) if i.state == "fail"
    ]
    assert found.line() == (
        "fail slurm: sinfo --noheader --format=%R failed: sinfo: error: no host; sinfo: fatal: no "
        "source; do: ask the site whether Slurm is up"
    )


GPU, NPU = ({"runtime": "apptainer", "image": f"images/verl-{kind}.sif"} for kind in ("a", "b"))


@pytest.mark.parametrize(
    ("changes", "configuration"),
    [
        ({}, "skip"),
        ({"resume_from": "no/such/step"}, "fail"),
        ({"model": {"path": "no/model"}}, "fail"),
    ],
)
def test_a_missing_image_is_said_once_with_what_builds_it(
    config: Callable[..., Path], changes: dict[str, Any], configuration: str
) -> None:
    analysis = {"image": "images/compare.sif", "torch_image": GPU["image"]}
    path = config(
        **changes,
        benchmark={"container": GPU},
        target={"device": "npu", "container": NPU},
        analysis=analysis,
    )
    items = list(examine(path))
    for kind in ("verl-a", "verl-b", "compare"):
        image = f"images/{kind}.sif"
        builds = [i for i in items if i.action and f"apptainer build {image} " in i.action]
        assert len(builds) == 1 and builds[0].found == f"{image} does not exist"
        assert not [i for i in items if i.name == "configuration" and image in i.found]
    found = by_name(items)
    assert found["analysis.torch_image"].state == "fail"
    assert found["analysis.torch_image"].action == "as for benchmark.container.image: one image"
    assert [i.state for i in items if i.name == "configuration"] == [configuration]


def test_what_no_item_looks_at_stays_a_problem_of_the_configuration(
    config: Callable[..., Path],
) -> None:
    path = config(benchmark={"container": GPU}, target={"device": "npu", "container": NPU})
    items = list(examine(path, side="benchmark"))
    problems = [i.found for i in items if i.name == "configuration"]
    assert len(problems) == 1 and problems[0].startswith("target.container.image: ")


def estimated(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert main(["estimate", "--config", str(path), "--json", "found.json"]) == 0
    found: dict[str, Any] = json.loads(Path("found.json").read_text())
    return found, capsys.readouterr().out


def test_what_rejoining_keeps_is_estimated(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of actor and critic: weights and two moments, at each captured step but the first."""
    steps = {"total": 3, "start": 0, "end": 2}
    alone, said = estimated(config(steps=steps), capsys)
    assert alone["states"] == 0 and "rejoin" not in said
    found, said = estimated(config(steps=steps, controls={"rejoin": True}), capsys)
    # 107,141 and 90,694 parameters, four bytes each, three times, at two steps
    real = (107_141 + 90_694) * 12 * 2
    assert real < found["states"] < 2 * real
    assert "optimizer state for controls.rejoin: " in said
    grew = {r: found["runs"][r]["bytes"] - alone["runs"][r]["bytes"] for r in ("target",)}
    assert grew == {"target": 0}
    assert (
        found["runs"]["benchmark"]["bytes"] - alone["runs"]["benchmark"]["bytes"] == found["states"]
    )
    one, _ = estimated(config(controls={"rejoin": True}, steps={"total": 1}), capsys)
    assert one["states"] == 0


def test_the_stages_that_a_run_records_are_estimated_and_no_others(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them by default: the last one, which writes the most, is not left out."""

    def runs(**changes: Any) -> dict[str, int]:
        found, _ = estimated(config(**changes), capsys)
        return {role: run["bytes"] for role, run in found["runs"].items()}

    def of(*names: str) -> dict[str, int]:
        return runs(capture={"stages": list(names), "key_data": False})

    everything = runs(capture={"key_data": False})
    executed = [s for s in STAGES if s not in (FORCED, TEACHER)]
    assert everything == of(*executed)
    for stage in executed:
        assert of(*(s for s in executed if s != stage))["benchmark"] < everything["benchmark"]
    # a replay generates nothing
    assert of(*executed[1:])["target"] == everything["target"] < everything["benchmark"]
    assert everything["repeat"] == everything["target"]
    without_critic = [*yaml.safe_load((ROOT / "config/config.yaml").read_text())["overrides"]]
    without_critic[0] = "algorithm.adv_estimator=grpo"
    assert runs(overrides=without_critic)["target"] < runs()["target"]
    assert runs(generation="compare")["target"] > runs()["target"]


def test_no_estimate_says_why(config: Callable[..., Path]) -> None:
    """A run that the framework would refuse has none; the doctor goes on with what it can tell."""
    found = by_name(list(examine(config(overrides=["no.such_key=1"]))))
    assert found["configuration"].state == "fail"
    assert "no estimate: " in found["store space"].found
    assert "no.such_key" in found["store space"].found


def test_adapters_alone_are_kept_and_a_models_files_say_its_size(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"num_hidden_layers": 4, "hidden_size": 256, "torch_dtype": "bfloat16"})
    )
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(20 << 20)  # ten million parameters
    changes: dict[str, Any] = {
        "model": {"path": str(model)},
        "steps": {"total": 2, "start": 1, "end": 1},
        "controls": {"rejoin": True},
    }
    grpo = ["algorithm.adv_estimator=grpo"]
    whole, _ = estimated(config(overrides=grpo, **changes), capsys)
    assert whole["states"] == (10 << 20) * 12
    lora = [*grpo, "actor_rollout_ref.model.lora_rank=8"]
    adapters, _ = estimated(config(overrides=lora, **changes), capsys)
    assert 0 < adapters["states"] < whole["states"] / 20
