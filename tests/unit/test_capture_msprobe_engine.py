"""Is every msprobe session a clean one? Each trap of msprobe's dumps, against msprobe itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msprobe")

from rlprobe import sketch  # noqa: E402
from rlprobe.capture.msprobe.engine import renamed  # noqa: E402
from rlprobe.capture.msprobe.files import StageFiles  # noqa: E402
from rlprobe.errors import DumpError  # noqa: E402
from tests.forked import Forked  # noqa: E402
from tests.unit.capture_helpers import UPDATE, dump, leaves, make, rank_dir  # noqa: E402

pytestmark = [pytest.mark.msprobe, pytest.mark.slow]

LOG_PROB = "actor_compute_log_prob"
Scenario = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def scenario(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Runs a scenario once; gives its directory and what it saw."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in done:
            directory = tmp_path_factory.mktemp(name.replace(" ", "_"))
            script = Path(__file__).with_name("capture_msprobe_run.py")
            result = forked.run(script, name, directory)
            assert result.returncode == 0, result.stdout[-4000:]
            done[name] = directory, json.loads((directory / "seen.json").read_text())
        return done[name]

    return run


def numbers(data: dict[str, Any], call: int) -> dict[str, Any]:
    """The records of one call, without its number."""
    ending = f".{call}"
    return {key[: -len(ending)]: value for key, value in data.items() if key.endswith(ending)}


def test_sessions_do_not_leak_into_each_other(scenario: Scenario) -> None:
    root, _ = scenario("sessions")
    update, log_prob = dump(root), dump(root, LOG_PROB)
    assert all(key.endswith(".0") for key in log_prob)
    assert not any("backward" in key for key in log_prob)
    assert {key.rpartition(".")[2] for key in update} == {"0", "1"}
    first, second = numbers(update, 0), numbers(update, 1)
    assert first == second, "the same weights and tokens gave other records in the second entry"
    assert dump(root, step=1) == {f"{key}.0": value for key, value in first.items()}
    assert dump(root, step=3) == dump(root, step=1), "a failed session left something behind"


def test_the_first_and_the_last_module_are_there_though_verl_is_loaded(scenario: Scenario) -> None:
    root, _ = scenario("sessions")
    assert "Module.embed.Embedding.forward.0" in dump(root)
    assert "Module.head.Linear.forward.0" in dump(root)


def test_ranks_are_ranks_without_torch_distributed(scenario: Scenario) -> None:
    root, _ = scenario("sessions")
    found = {path.name for path in (root / "dump").glob("*/step*/*")}
    assert found == {"rank0"}


def test_the_model_is_left_as_it_was(scenario: Scenario) -> None:
    _, seen = scenario("sessions")
    clean: dict[str, list[str]] = {"hooks": [], "marks": []}
    assert seen["between"] == clean
    assert seen["after"] == clean


def test_a_failed_stage_leaves_nothing(scenario: Scenario) -> None:
    root, seen = scenario("sessions")
    assert seen["failed"]
    assert not rank_dir(root, step=2).exists()
    assert not list((root / "dump").rglob("*.msprobe"))


def test_all_three_files_name_the_renumbered_records(scenario: Scenario) -> None:
    root, _ = scenario("sessions")
    stack = json.loads((rank_dir(root) / "stack.json").read_text())
    named = {name for names, _ in stack.values() for name in names}
    assert named == {key for key in dump(root) if ".forward." in key}
    construct = json.loads((rank_dir(root) / "construct.json").read_text())
    assert construct["Module.layers.0.up.Linear.forward.1"] == "Module.layers.0.Block.forward.1"


def test_sketches_are_those_of_the_tensors(scenario: Scenario) -> None:
    root, _ = scenario("sessions")
    weight = make().get_parameter("layers.1.up.weight").detach()
    leaf = dump(root)["Module.layers.1.up.Linear.forward.0"]["parameters"]["weight"]
    assert leaf["Norm"] == torch.norm(weight).item()
    expected = sketch.sketch(weight.numpy())
    assert abs(sketch.decode(leaf["Sketch"]) - expected).max() < 1e-5
    floats = [leaf for leaf in leaves(dump(root)) if leaf["dtype"] == "torch.float32"]
    assert all("Sketch" in leaf for leaf in floats if leaf["shape"])


def test_the_token_range_counts_forwards(scenario: Scenario) -> None:
    root, _ = scenario("sessions")
    data = dump(root, "actor_generate_sequences")
    assert [key for key in data if "head" in key] == ["Module.head.Linear.forward.0"]


def test_other_options_in_the_same_process_are_refused(scenario: Scenario) -> None:
    _, seen = scenario("sessions")
    assert "level: 'L0' -> 'L1'" in seen["refused"]


def test_tensors_of_all_entries_are_there_under_the_names_in_the_dump(scenario: Scenario) -> None:
    root, _ = scenario("tensors")
    data = dump(root)
    names = [leaf["data_name"] for leaf in leaves(data) if "data_name" in leaf]
    folder = rank_dir(root) / "dump_tensor_data"
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    assert len(names) == len(set(names)) > 200
    for call in (0, 1):
        leaf = data[f"Module.embed.Embedding.forward.{call}"]["output"][0]
        stored = torch.load(folder / leaf["data_name"], weights_only=True)
        assert torch.equal(stored, torch.load(root / "expected.pt", weights_only=True))
        assert "Sketch" in leaf
    document = json.loads((rank_dir(root) / "dump.json").read_text())
    assert document["dump_data_dir"] == str(folder)


def test_api_records_come_back_after_an_exception_in_forward(scenario: Scenario) -> None:
    root, _ = scenario("tensors")
    first = [key for key in dump(root) if key.startswith("Functional.linear.")]
    later = [key for key in dump(root, step=2) if key.startswith("Functional.linear.")]
    assert len(first) == 2 * len(later) > 0


def test_torchs_functions_are_given_back_after_each_stage(scenario: Scenario) -> None:
    _, seen = scenario("tensors")
    assert seen["restored"] == [True, True, True]


def test_checksums_are_of_the_tensor_as_it_was(scenario: Scenario) -> None:
    root, seen = scenario("checksums")
    record = dump(root, LOG_PROB)["Module.first.First.forward.0"]
    assert record["output"][0]["md5"] == seen["expected"]


def test_the_structure_task_is_not_an_empty_capture(scenario: Scenario) -> None:
    root, _ = scenario("structure")
    construct = json.loads((rank_dir(root) / "construct.json").read_text())
    assert "Module.layers.0.up.Linear.forward.0" in construct
    line = json.loads((root / "side/parts/captured/actor-rank0.jsonl").read_text())
    assert line["records"] > 0


def test_only_the_chosen_module_and_what_runs_in_it(scenario: Scenario) -> None:
    root, _ = scenario("only")
    layer, leaf, everything, again = (dump(root, step=number) for number in (0, 1, 2, 4))
    modules = {name for name in layer if name.startswith("Module.")}
    assert modules == {name for name in everything if name.startswith("Module.layers.1.")}
    assert any("backward" in name for name in modules)
    assert any("parameters_grad" in name for name in modules)
    # the block's own calls: three of its modules' linear, its norm, its sigmoid, product and sum
    construct = json.loads((rank_dir(root, step=2) / "construct.json").read_text())
    inside = {
        name
        for name in everything
        if name.endswith(".forward") and str(construct[name]).startswith("Module.layers.1.")
    }
    assert {name.split(".")[1] for name in inside} >= {"linear", "layer_norm", "sigmoid"}
    assert {name for name in layer if name.endswith(".forward")} == inside
    assert {name for name in layer if name.endswith(".backward")} == {
        name
        for name in everything
        if name.endswith(".backward") and f"{name[:-9]}.forward" in inside
    }
    assert {name.split(".")[0] for name in leaf} == {"Module", "Functional"}
    assert len([name for name in leaf if name.startswith("Functional.linear.")]) == 2
    assert again.keys() == everything.keys(), "the choice must end with its stage"
    assert all(layer[name] == everything[name] for name in layer)


def test_a_module_that_is_not_there_is_named_and_leaves_nothing(scenario: Scenario) -> None:
    root, seen = scenario("only")
    assert "none of layers.7 is in the model" in seen["refused"]
    assert seen["hooks"] == []
    assert not rank_dir(root, step=3).exists()


def test_a_debugger_of_somebody_elses_is_refused(scenario: Scenario) -> None:
    _, seen = scenario("foreign")
    assert "did not make" in seen["refused"]


def test_modules_have_the_light_engines_names(tmp_path: Path) -> None:
    """Under wrappers and FSDP2, whose classes msprobe would name."""
    linear = torch.nn.Linear(2, 2)
    fully_sharded = type("FSDPModule", (), {})
    linear.__class__ = type("FSDPLinear", (fully_sharded, torch.nn.Linear), {})
    wrapper = type("DistributedDataParallel", (torch.nn.Module,), {})()
    wrapper.module = torch.nn.Sequential(linear)
    heads = renamed([wrapper])
    assert heads == {"Module.module.0.FSDPLinear": "Module.0.Linear"}
    files = StageFiles(tmp_path / UPDATE)
    for entry in (0, 1):
        place = tmp_path / f"aside{entry}/step0/rank0"
        name = "Module.module.0.FSDPLinear.forward.0"
        _entry(place, f"{name}.output.0.pt", f"{name}.output.0.pt", name)
        (place / "construct.json").write_text(json.dumps({name: None, "Torch.add.0.forward": name}))
        files.add(tmp_path / f"aside{entry}", heads)
    data = json.loads((tmp_path / UPDATE / "dump.json").read_text())["data"]
    assert list(data) == ["Module.0.Linear.forward.0", "Module.0.Linear.forward.1"]
    tensors = {path.name for path in (tmp_path / UPDATE / "dump_tensor_data").iterdir()}
    assert tensors == {f"Module.0.Linear.forward.{n}.output.0.pt" for n in (0, 1)}
    construct = json.loads((tmp_path / UPDATE / "construct.json").read_text())
    assert construct["Torch.add.1.forward"] == "Module.0.Linear.forward.1"


def _entry(
    directory: Path, name: str, file: str | None, record: str = "Module.a.Linear.forward.0"
) -> None:
    (directory / "dump_tensor_data").mkdir(parents=True)
    leaf = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "data_name": name}
    data = {record: {"output": [leaf]}}
    (directory / "dump.json").write_text(json.dumps({"task": "tensor", "data": data}))
    if file is not None:
        (directory / "dump_tensor_data" / file).write_bytes(b"x")


def test_a_tensor_file_that_was_not_written_is_noticed(tmp_path: Path) -> None:
    _entry(tmp_path / "aside/step0/rank0", "Module.a.Linear.forward.0.output.0.pt", None)
    with pytest.raises(DumpError, match="names 1 tensor files"):
        StageFiles(tmp_path / UPDATE).add(tmp_path / "aside")
    assert not (tmp_path / UPDATE / "dump.json").exists()


def test_a_session_that_left_nothing_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    with pytest.raises(DumpError, match="0 dumps"):
        StageFiles(tmp_path / UPDATE).add(tmp_path / "aside")


def _own(scenario: Scenario, name: str) -> Path:
    return scenario(f"own {name}")[0]


def test_extra_info_off_leaves_out_what_it_says(scenario: Scenario) -> None:
    root = _own(scenario, "extra_info")
    for stage in (UPDATE, LOG_PROB):
        assert any(name.startswith("Module.0.head") for name in dump(root, stage))
        left = {path.name for path in rank_dir(root, stage).iterdir()}
        assert not {"stack.json", "construct.json"} & left


def test_scope_is_from_one_module_to_another(scenario: Scenario) -> None:
    root = _own(scenario, "scope")
    heads = {name.split(".forward")[0] for name in dump(root, LOG_PROB)}
    assert "Module.0.layers.0.up.Linear" in heads
    assert "Module.0.layers.1.up.Linear" in heads
    assert not [name for name in heads if "embed" in name or "head" in name]


def test_list_is_what_a_name_holds(scenario: Scenario) -> None:
    names = dump(_own(scenario, "list"), LOG_PROB)
    assert names
    assert all("layers.1" in name for name in names)
    root = _own(scenario, "list of tensors")
    kept = [path.name for path in (rank_dir(root, LOG_PROB) / "dump_tensor_data").iterdir()]
    assert kept
    assert all("sigmoid" in name for name in kept)


def test_tensor_list_keeps_the_tensors_of_some_beside_the_statistics_of_all(
    scenario: Scenario,
) -> None:
    root = _own(scenario, "tensor_list")
    for stage in (UPDATE, LOG_PROB):
        names = dump(root, stage)
        assert any("layers.0" in name for name in names)
        kept = [path.name for path in (rank_dir(root, stage) / "dump_tensor_data").iterdir()]
        assert kept
        assert all("head" in name for name in kept)


def test_async_dump_writes_the_same(scenario: Scenario) -> None:
    root = _own(scenario, "async_dump")
    for stage in (UPDATE, LOG_PROB):
        kept = list((rank_dir(root, stage) / "dump_tensor_data").iterdir())
        assert kept
        for path in kept:
            torch.load(path, weights_only=True)
    later, at_once = _own(scenario, "async_dump statistics"), _own(scenario, "extra_info")
    for stage in (UPDATE, LOG_PROB):
        assert leaves(dump(later, stage)) == leaves(dump(at_once, stage))
