"""Whatever a user points at, is it found, paired with its counterpart, and named?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.cli import main
from rlprobe.compare import early, planner, sides
from rlprobe.compare.compare import Options, compare
from rlprobe.compare.insufficiency import insufficient
from rlprobe.compare.sides import UNNAMED
from rlprobe.compare.stage_sources import Process, RolloutStage
from rlprobe.dumps import records
from rlprobe.errors import DumpError, NotComparableError, RlprobeError, StoreError, UsageError
from tests.msprobe import dumps
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import list_files
from tests.unit.sides_helpers import paired

ONE = {"Functional.linear.0.forward": call([tensor()], [tensor()])}


def tree(root: Path, *places: str) -> Path:
    for place in places:
        dumps.write(root / place, ONE)
    return root


def stored(root: Path, stage: str, ranks: int = 1) -> Path:
    """A run as the store has it, as far as compare looks."""
    dumps_ = tree(root / "dump", *(f"{stage}/step0/rank{rank}" for rank in range(ranks)))
    (root / "records").mkdir()
    frame = records.build(dumps_ / stage, stage)
    records.write(frame, root / "records" / f"{stage}.parquet")
    list_files(root)
    return root


@pytest.mark.parametrize(
    ("below", "stage", "process"),
    [
        ("", "actor_update", Process(3, 1)),
        ("actor_update", "actor_update", Process(3, 1)),
        ("actor_update/step3", "actor_update", Process(3, 1)),
        ("actor_update/step3/rank1", "actor_update", Process(3, 1)),
        ("actor_update/step3/rank1/dump.json", "actor_update", Process(3, 1)),
    ],
)
def test_every_level_of_a_tree(tmp_path: Path, below: str, stage: str, process: Process) -> None:
    tree(tmp_path, "actor_update/step3/rank1")
    side = sides.resolve(str(tmp_path / below))
    assert {name: list(s.processes) for name, s in side.stages.items()} == {stage: [process]}


@pytest.mark.parametrize("below", ["", "actor_update"])
def test_the_guides_drawing_has_no_step(tmp_path: Path, below: str) -> None:
    """``actor_update/rank0/dump.json``, as the vendor's guide draws the tree."""
    tree(tmp_path, "actor_update/rank0", "actor_update/rank1", "data/prompts/rank0")
    if not below:
        tree(tmp_path, "reference_compute_log_prob/step2/rank0")
    side = sides.resolve(str(tmp_path / below))
    found = {name: list(s.processes) for name, s in side.stages.items()}
    assert found.pop("actor_update") == [Process(0, 0), Process(0, 1)]
    beside = {"reference_compute_log_prob": [Process(2, 0)]}
    assert found == ({} if below else beside)


def test_a_directory_with_a_dump_inside(tmp_path: Path) -> None:
    """What a run leaves in scratch space: ``dump/`` beside other things."""
    tree(tmp_path / "dump", "critic_update/step0/proc9")
    assert list(sides.resolve(str(tmp_path)).stages) == ["critic_update"]


def test_slimes_names_become_canonical(tmp_path: Path) -> None:
    tree(tmp_path, "old_log_prob/step0/rank0", "actor_train/step0/rank0")
    assert list(sides.resolve(str(tmp_path)).stages) == ["actor_compute_log_prob", "actor_update"]


def test_one_stage_under_two_names_is_refused(tmp_path: Path) -> None:
    tree(tmp_path, "old_log_prob/step0/rank0", "actor_compute_log_prob/step0/rank0")
    with pytest.raises(DumpError, match="two names"):
        sides.resolve(str(tmp_path))


def test_a_directory_of_another_name_is_unnamed(tmp_path: Path) -> None:
    tree(tmp_path / "mydump", "step0/rank0")
    assert list(sides.resolve(str(tmp_path / "mydump")).stages) == [UNNAMED]


def test_runs_are_found_by_directory_and_by_key(tmp_path: Path) -> None:
    key = "0123abcd" * 8
    stored(tmp_path / "runs" / key, "actor_update", ranks=2)
    for name in (str(tmp_path / "runs" / key), key, key[:10], key[:7], key[:4]):
        side = sides.resolve(name, tmp_path)
        assert list(side.stages["actor_update"].processes) == [Process(0, 0), Process(0, 1)]


def test_a_run_without_its_manifest_is_no_dump(tmp_path: Path) -> None:
    """Nothing says any more what was captured in it: what is left may be half of it."""
    run = stored(tmp_path / "runs" / ("0123abcd" * 8), "actor_update")
    (run / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"manifest\.json is missing.*`rlprobe store verify"):
        sides.resolve(str(run))
    # a directory that no store holds is what lies there
    assert sides.resolve(str(run.rename(tmp_path / "copied"))).stages


@pytest.mark.parametrize("content", ["", '{"a', "[1]"])
def test_a_damaged_manifest_says_the_way_back(tmp_path: Path, content: str) -> None:
    run = stored(tmp_path / "runs" / ("0123abcd" * 8), "actor_update")
    (run / "manifest.json").write_text(content)
    with pytest.raises(StoreError, match=f"`rlprobe store verify --store {tmp_path}`"):
        sides.resolve(str(run))


def test_a_cut_table_says_the_way_back(tmp_path: Path) -> None:
    run = stored(tmp_path / "runs" / ("0123abcd" * 8), "actor_update")
    table = run / "records/actor_update.parquet"
    table.write_bytes(table.read_bytes()[:-9])
    with pytest.raises(StoreError, match=r"is not what was committed.*`rlprobe store verify"):
        sides.resolve(str(run))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no run's key: 4 or more of the digits"),
        ("012", "no run's key: 4 or more of the digits"),
        ("0123456789ab", "no run 0123456789ab in .*; it has 4567"),
        ("4567", "begins 2 run keys in .*: 4567aaaa"),
    ],
)
def test_what_is_not_there_is_named_and_keys_are_spoken_of(
    tmp_path: Path, name: str, said: str
) -> None:
    for middle in "ab":
        stored(tmp_path / "runs" / ("4567" + middle * 60), "actor_update", ranks=1)
    with pytest.raises(UsageError, match=f"{name}: no such file or directory.*{said}"):
        sides.resolve(name, tmp_path)


@pytest.mark.parametrize(
    ("benchmark", "target", "said"),
    [
        ("a", "b", ["a: no such file", "b: no such file"]),
        ("a", "empty", ["a: no such file", "empty holds no dump"]),
        ("empty", "b", ["empty holds no dump", "b: no such file"]),
        ("", "b", ["an empty path names nothing", "b: no such file"]),
    ],
)
def test_of_two_sides_that_are_nothing_both_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark: str, target: str, said: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(RlprobeError) as error:
        sides.both(benchmark, target)
    assert all(words in str(error.value) for words in said)


def test_one_side_that_is_nothing_is_named_once(tmp_path: Path) -> None:
    run = stored(tmp_path / "runs" / ("0123abcd" * 8), "actor_update")
    for both in ((str(run), "a"), ("a", str(run)), ("a", "a")):
        with pytest.raises(UsageError) as error:
            sides.both(*both)
        assert str(error.value).count("no such file") == 1
    assert [side.path for side in sides.both(str(run), str(run))] == [run, run]


def test_a_key_without_a_store_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a run's key needs --store"):
        sides.resolve("62d8")
    with pytest.raises(UsageError, match="there is no store"):
        sides.resolve("62d8", tmp_path / "nowhere")


def test_a_directory_without_dumps_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DumpError, match=r"manifest\.json.*dump\.json.*step"):
        sides.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "said", "step"),
    [
        ("3.jsonl", "verl's rollout_data_dir", 3),
        ("1/gen_batch.dp", "verl's skip.rollout", 1),
        ("GBS4_N2_in8_out8/7/gen_batch.dp", "verl's skip.rollout", 7),
        ("run_project/GBS4_N2_in8_out8/7/gen_batch.dp", "verl's skip.rollout", 7),
        ("1/0/tq_batch.pt", "verl's skip.rollout_tq", 1),
    ],
)
def test_folders_of_rollouts_are_known_for_what_they_are(
    tmp_path: Path, file: str, said: str, step: int
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    for path in (tmp_path, (tmp_path / file).parent, tmp_path / file):
        (found,) = sides.resolve(str(path)).stages.values()
        assert isinstance(found, RolloutStage)
        assert (found.folder.kind.name, list(found.folder.steps)) == (said, [step])


def test_a_file_of_another_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text("{}")
    with pytest.raises(DumpError, match=r"neither dump\.json"):
        sides.resolve(str(tmp_path / "my.json"))


def test_a_run_meets_a_plain_dump(tmp_path: Path) -> None:
    """What the store holds against what a user already has, without a word about either."""
    run = stored(tmp_path / "run", "actor_update")
    tree(tmp_path / "plain", "step7/proc123")
    result = compare(
        sides.resolve(str(run)),
        sides.resolve(str(tmp_path / "plain/step7/proc123/dump.json")),
        tmp_path / "out",
        Options(),
    )
    (summary,) = result
    assert summary.stage == "actor_update" and (summary.compared, summary.unseen) == (2, 2)
    assert any("step 0 of the benchmark is compared with step 7" in n for n in summary.notes)


def planned(tmp_path: Path, left: list[str], right: list[str], *wanted: str) -> Any:
    both = [tree(tmp_path / side, *places) for side, places in (("b", left), ("t", right))]
    benchmark, target = (sides.resolve(str(side)) for side in both)
    return planner.plan(benchmark, target, wanted)


def test_common_stages_in_canonical_order(tmp_path: Path) -> None:
    stages = ["actor_update", "actor_compute_log_prob", "critic_update"]
    places = [f"{stage}/step0/rank0" for stage in stages]
    plan = planned(tmp_path, places, places)
    assert [stage.stage for stage in plan] == [
        "actor_compute_log_prob",
        "critic_update",
        "actor_update",
    ]


def test_a_stage_on_one_side_is_planned_as_such(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        ["actor_update/step0/rank0", "critic_update/step0/rank0"],
        ["actor_update/step0/rank0", "actor_compute_log_prob/step0/rank0"],
    )
    assert {s.stage: (s.benchmark is not None, s.target is not None) for s in plan} == {
        "actor_update": (True, True),
        "critic_update": (True, False),
        "actor_compute_log_prob": (False, True),
    }


def test_no_stage_in_common_is_not_comparable(tmp_path: Path) -> None:
    left = ["actor_update/step0/rank0", "critic_update/step0/rank0"]
    right = ["actor_compute_log_prob/step0/rank0", "critic_compute_values/step0/rank0"]
    with pytest.raises(NotComparableError, match="no stage in common"):
        planned(tmp_path, left, right)


def test_a_stage_nobody_has_is_not_comparable_and_a_wrong_name_is_a_mistake(tmp_path: Path) -> None:
    places = ["actor_update/step0/rank0", "critic_update/step0/rank0"]
    with pytest.raises(NotComparableError, match="benchmark has critic_update, actor_update"):
        planned(tmp_path, places, places, "critic_compute_values")
    with pytest.raises(UsageError, match="'critic_udpate' is on neither side"):
        planned(tmp_path, places, places, "critic_udpate")


def test_two_stages_pointed_at_are_compared_whatever_they_are(tmp_path: Path) -> None:
    benchmark, target = (
        sides.resolve(str(tree(tmp_path, f"{stage}/step0/rank0") / stage))
        for stage in ("actor_compute_log_prob", "reference_compute_log_prob")
    )
    (plan,) = planner.plan(benchmark, target)
    assert plan.stage == "actor_compute_log_prob"
    assert "is compared with reference_compute_log_prob" in plan.notes[0]


def test_trees_that_hold_one_stage_each_were_not_pointed_at(tmp_path: Path) -> None:
    with pytest.raises(NotComparableError, match="no stage in common"):
        planned(tmp_path, ["actor_update/step0/rank0"], ["critic_update/step0/rank0"])


@pytest.mark.parametrize("wanted", [[], ["--stage", "actor_compute_log_prob"]])
def test_runs_without_a_common_stage_leave_results_that_say_so(
    tmp_path: Path, wanted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stages = "actor_update", "critic_update"
    runs = [stored(tmp_path / stage, stage) for stage in stages]
    command = ["compare", *map(str, runs), "-o", str(tmp_path / "out"), *wanted]
    assert main([*command, "--no-fail"]) == 0
    assert main(command) == 4
    assert "stage" in capsys.readouterr().err
    for stage in wanted[1:] or stages:
        summary = json.loads((tmp_path / "out" / stage / "summary.json").read_text())
        assert summary["coverage"] == {"benchmark": 0.0, "target": 0.0}
        assert summary["compared"] == 0 and "actor_update" in summary["notes"][0]
        assert pl.read_parquet(tmp_path / "out" / stage / "records.parquet").is_empty()


def test_a_given_name_names_a_directory_that_does_not_say(tmp_path: Path) -> None:
    (plan,) = planned(tmp_path, ["step0/rank0"], ["step0/proc3"], "old_log_prob")
    assert plan.stage == "actor_compute_log_prob"


def test_steps_and_ranks_are_paired_by_number(tmp_path: Path) -> None:
    (plan,) = planned(
        tmp_path,
        [f"actor_update/step{s}/rank{r}" for s in (0, 1) for r in (0, 1)],
        [f"actor_update/step{s}/rank{r}" for s in (1, 2) for r in (0, 1)],
    )
    found = {
        (p.step, p.rank): (p.benchmark is not None, p.target is not None) for p in plan.pairings
    }
    assert found == {
        (0, 0): (True, False),
        (0, 1): (True, False),
        (1, 0): (True, True),
        (1, 1): (True, True),
        (2, 0): (False, True),
        (2, 1): (False, True),
    }


def test_generation_on_one_side_is_no_lack(tmp_path: Path) -> None:
    """A replay does not generate, and no other stage may be missing."""
    tree(tmp_path / "b", "actor_generate_sequences/step0/rank0", "actor_update/step0/rank0")
    tree(tmp_path / "t", "actor_update/step0/rank0", "critic_update/step0/rank0")
    benchmark, target = (sides.resolve(str(tmp_path / side)) for side in "bt")
    options = Options()
    summaries = compare(benchmark, target, tmp_path / "out", options)
    assert (
        str(insufficient(summaries, options.coverage, options.stages)).count("critic_update:") == 1
    )
    assert "actor_generate_sequences" not in str(
        insufficient(summaries, options.coverage, options.stages)
    )


def test_the_command_writes_a_directory_per_stage_and_json(tmp_path: Path) -> None:
    for side in "bt":
        tree(tmp_path / side, "actor_update/step0/rank0", "critic_update/step0/rank0")
    report = tmp_path / "report.json"
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "out")]
    assert main([*command, "--pair", "repeat", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["comparable"] and [s["stage"] for s in found["stages"]] == [
        "critic_update",
        "actor_update",
    ]
    for stage in ("actor_update", "critic_update"):
        summary = json.loads((tmp_path / "out" / stage / "summary.json").read_text())
        assert (summary["format"], summary["pair"], summary["stage"]) == (2, "repeat", stage)
        assert not list((tmp_path / "out" / stage).glob(".*"))


@pytest.mark.parametrize("option", [["--coverage", "1.5"], ["--jobs", "0"], ["--rules", "none"]])
def test_wrong_options_are_usage_errors(tmp_path: Path, option: list[str]) -> None:
    tree(tmp_path / "b", "step0/rank0")
    side = str(tmp_path / "b")
    assert main(["compare", side, side, "-o", str(tmp_path / "out"), *option]) == 2


def test_several_processes_are_one_table_in_order(tmp_path: Path) -> None:
    for side in "bt":
        tree(tmp_path / side, *(f"actor_update/step{s}/rank{r}" for s in (0, 1) for r in (0, 1, 2)))
    benchmark, target = (sides.resolve(str(tmp_path / side)) for side in "bt")
    compare(benchmark, target, tmp_path / "out", Options())
    import polars as pl

    frame = pl.read_parquet(tmp_path / "out/actor_update/records.parquet")
    assert frame.select("step", "rank").unique(maintain_order=True).rows() == [
        (s, r) for s in (0, 1) for r in (0, 1, 2)
    ]
    assert frame.height == 12


@pytest.mark.parametrize("ranks", [1, 3])
def test_large_dumps_are_decoded_in_processes_beside_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """One pair with this process's help, several in processes of their own."""
    benchmark, target = dumps.random_pair(4, 30)
    for rank in range(ranks):
        dumps.write(tmp_path / f"b/step0/rank{rank}", benchmark)
        dumps.write(tmp_path / f"t/step0/rank{rank}", target)
    benchmark, target = (sides.resolve(str(tmp_path / side)) for side in "bt")
    compare(benchmark, target, tmp_path / "one", Options(jobs=1))
    monkeypatch.setattr(early, "WORTHWHILE", 1)
    compare(benchmark, target, tmp_path / "two", Options(jobs=2))
    one, two = (pl.read_parquet(tmp_path / n / "unnamed/records.parquet") for n in ("one", "two"))
    assert one.equals(two)


def test_what_is_begun_early_says_nothing_of_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "WORTHWHILE", 1)
    (tmp_path / "run/records").mkdir(parents=True)
    (tmp_path / "run/manifest.json").write_text("{}")
    (tmp_path / "run/records/actor_update.parquet").mkdir()
    tree(tmp_path / "tree", "actor_update/step0/rank0")
    with early.begun([str(tmp_path / "run"), str(tmp_path / "nothing")], 2) as beside:
        assert beside is None
    with early.begun([str(tmp_path / "tree"), str(tmp_path / "run")], 2) as beside:
        assert beside is None
    with early.begun([str(tmp_path / "tree")] * 2, 1) as beside:
        assert beside is None
    with early.begun([str(tmp_path / "tree")] * 2, 2) as beside:
        assert beside is not None and beside.submit(len, "two").result() == 3


@pytest.mark.parametrize("damaged", ["b", "t", "bt"])
def test_a_damaged_dump_is_told_whichever_process_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    for side in "bt":
        file = dumps.write(tmp_path / side / "step0/rank0", dumps.random_pair(4, 3)[0])
        if side in damaged:
            file.write_text('{"data": {"a')
    monkeypatch.setattr(early, "WORTHWHILE", 1)
    first, second = (sides.resolve(str(tmp_path / side)) for side in "bt")
    with pytest.raises(DumpError, match=f"{damaged[0]}/step0/rank0/dump.json is not a complete"):
        compare(first, second, tmp_path / "out", Options(jobs=2))


def test_stages_beside_process_numbers_keep_their_names(tmp_path: Path) -> None:
    tree(tmp_path, "actor_update/step0/rank0", "31/step0/rank0")
    assert set(sides.resolve(str(tmp_path)).stages) == {"actor_update", UNNAMED}


def test_steps_that_do_not_overlap_are_both_listed_with_the_way_out(tmp_path: Path) -> None:
    for name, first in (("b", 0), ("t", 10)):
        tree(tmp_path / name, *(f"step{first + n}/rank0" for n in range(3)))
    found, notes = paired(tmp_path)
    assert all("" in pair for pair in found)
    assert "steps 0 to 2, the target 10 to 12" in notes[0]
    assert "--map-step 0:10" in notes[0]
    found, notes = paired(tmp_path, map_steps={0: 10})
    assert found == [(f"step{n}/rank0", f"step{n + 10}/rank0") for n in range(3)]
    assert notes == []


def test_several_mapped_steps_leave_the_others_where_they_are(tmp_path: Path) -> None:
    tree(tmp_path / "b", *(f"step{n}/rank0" for n in (0, 1, 2)))
    tree(tmp_path / "t", *(f"step{n}/rank0" for n in (1, 2, 7)))
    found, _ = paired(tmp_path, map_steps={0: 7, 1: 2})
    assert found == [
        ("step0/rank0", "step7/rank0"), ("step1/rank0", "step2/rank0"),
        ("step2/rank0", ""), ("", "step1/rank0"),
    ]  # fmt: skip


def test_steps_of_one_side_are_named(tmp_path: Path) -> None:
    tree(tmp_path / "b", *(f"step{n}/rank0" for n in (0, 1, 2, 5)))
    tree(tmp_path / "t", *(f"step{n}/rank0" for n in (2, 3)))
    _, notes = paired(tmp_path)
    assert notes == [
        "steps 0 to 1, 5 are on the benchmark only", "step 3 is on the target only"
    ]  # fmt: skip


@pytest.mark.parametrize("mapping", ["1", "a:b", "1:-2", "1:2:3"])
def test_a_mapping_that_is_none_is_a_usage_error(
    tmp_path: Path, mapping: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "a", "b", "-o", str(tmp_path / "o"), "--map-step", mapping])
    assert "such as 0:10" in capsys.readouterr().err


def test_an_empty_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty path"):
        sides.resolve("")
