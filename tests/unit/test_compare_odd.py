"""Odd pairs of dumps: what is not measured is said, and said as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import rlprobe
from rlprobe.cli import main
from rlprobe.errors import UsageError
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor

NAME = "Functional.linear.0.forward"


def command(root: Path, benchmark: Any, target: Any, *more: str) -> list[str]:
    """One call with these inputs and an output on either side."""
    for side, given in (("b", benchmark), ("t", target)):
        dumps.write(root / side / "step0/rank0", {NAME: call(given, [tensor()])})
    return ["compare", str(root / "b"), str(root / "t"), "-o", str(root / "o"), *more]


def lacking(root: Path) -> dict[str, tuple[int, str | None]]:
    summary = json.loads((root / "o/unnamed/summary.json").read_text())
    return {row["reason"]: (row["records"], row["detail"]) for row in summary["not_compared"]}


@pytest.mark.parametrize("value", [tensor(), scalar(1.5), scalar("eager"), [tensor(), tensor()]])
@pytest.mark.parametrize("side", ["benchmark", "target"])
def test_what_is_none_on_one_side_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any, side: str
) -> None:
    """Not another shape or type, and not a lack of statistics."""
    nothing = [None] * len(value) if isinstance(value, list) else None
    pair = [nothing], [value]
    assert main(command(tmp_path, *(pair if side == "benchmark" else pair[::-1]))) == 4
    other = "target" if side == "benchmark" else "benchmark"
    said = f"the {side} has None where the {other} has a value"
    count = len(value) if isinstance(value, list) else 1
    assert lacking(tmp_path) == {said: (count, None)}
    assert "the same arguments and switches" in capsys.readouterr().err


def test_an_argument_that_is_none_on_both_sides_lacks_nothing(tmp_path: Path) -> None:
    assert main(command(tmp_path, [None], [None])) == 0
    assert lacking(tmp_path) == {}


@pytest.mark.parametrize(
    ("one", "other", "types"),
    [(True, 1, "bool against int"), (1, 1.0, "int against float"), ("1", 1, "str against int")],
)
def test_scalars_of_two_types_are_not_of_two_precisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one: Any, other: Any, types: str
) -> None:
    assert main(command(tmp_path, [scalar(one)], [scalar(other)])) == 4
    assert lacking(tmp_path) == {"types of scalars differ": (1, types)}
    assert "precision" not in capsys.readouterr().err


def test_tensors_of_two_types_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, [tensor()], [tensor(dtype="torch.bfloat16")])) == 4
    assert lacking(tmp_path) == {"dtypes differ": (1, "torch.float32 against torch.bfloat16")}
    assert "in the same precision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kinds", "noted"),
    [(("0a0b0c0d", "0x0a0b0c0d"), True), (("0a0b0c0d", "0a0b0c0d"), False),
     (("0x0a", None), False), ((None, None), False)],
)  # fmt: skip
def test_checksums_of_two_kinds_are_said_to_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: tuple[Any, Any], noted: bool
) -> None:
    one, other = ([tensor(**({} if kind is None else {"md5": kind}))] for kind in kinds)
    assert main(command(tmp_path, one, other)) == 0
    said = "records whose checksums are of two kinds, which say nothing of each other: 1;"
    assert (said in capsys.readouterr().out) is noted


def test_what_is_nan_on_both_sides_is_listed_as_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [tensor((float("nan"), float("nan"), 0.0, 1.0)), tensor((1.0, float("-inf"), 0.0, 1.0))]
    assert main(command(tmp_path, odd, odd)) == 0
    out = capsys.readouterr().out
    assert "2 records not finite on both sides: of what is finite in them statistics say" in out


def test_of_several_ranks_the_list_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        for side, top in (("b", 2.0), ("t", 2.0 + rank)):
            data = {NAME: call([tensor()], [tensor((top, -1.0, 0.1, 3.0))])}
            dumps.write(tmp_path / side / f"step0/rank{rank}", data)
    assert main(["compare", *(str(tmp_path / n) for n in "bt"), "-o", str(tmp_path / "o")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines if line.endswith("forward.output.0")] == [
        f"{NAME}.output.0", f"rank 1: {NAME}.output.0",
    ]  # fmt: skip


def steps(root: Path, *numbers: int) -> list[str]:
    for side in "bt":
        for step in numbers:
            leaf = tensor((1.0 + step, -1.0, 0.0, 2.0))
            dumps.write(root / side / f"step{step}/rank0", {NAME: call([leaf], [])})
    return ["compare", str(root / "b"), str(root / "t"), "-o", str(root / "o")]


@pytest.mark.parametrize(
    ("given", "said"),
    [(("0:1", "0:2"), "0:1 and 0:2 name step 0 of the benchmark twice"),
     (("0:1", "2:1"), "0:1 and 2:1 name step 1 of the target twice")],
)  # fmt: skip
def test_a_step_that_is_mapped_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, str], said: str
) -> None:
    words = [word for pair in given for word in ("--map-step", pair)]
    assert main([*steps(tmp_path, 0, 1, 2), *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_step_that_is_mapped_twice_is_refused_from_python(tmp_path: Path) -> None:
    steps(tmp_path, 0, 1, 2)
    with pytest.raises(UsageError, match="0:1 and 2:1 name step 1 of the target twice"):
        rlprobe.compare_dumps(tmp_path / "b", tmp_path / "t", map_steps={0: 1, 2: 1})
    assert rlprobe.compare_dumps(
        tmp_path / "b", tmp_path / "t", map_steps={0: 1, 1: 0}
    ).judged.height


def test_the_same_pair_given_twice_is_one(tmp_path: Path) -> None:
    words = ["--map-step", "0:0", "--map-step", "0:0"]
    assert main([*steps(tmp_path, 0, 1), *words, "-q"]) == 0


def test_a_step_that_mapping_leaves_alone_is_not_called_missing(tmp_path: Path) -> None:
    assert main([*steps(tmp_path, 0, 1, 2), "--map-step", "0:1", "-q"]) == 4
    rows = pl.read_parquet(tmp_path / "o/unnamed/records.parquet")
    said = set(rows.get_column("reason").drop_nulls())
    assert {"--map-step leaves step 2 of the benchmark without a partner",
            "--map-step leaves step 0 of the target without a partner"} <= said  # fmt: skip
    assert not any(re.search("has no (rank|step)", reason) for reason in said)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (["step1/rank1"], "step1/rank1 (construct.json, stack.json)"),
        (["step0/rank0", "step0/rank1"], "step0/rank0 (construct.json, stack.json), step0/rank1"),
        (["step0/rank0", "step0/rank1", "step1/rank0", "step1/rank1"], "step1/rank1 (construct"),
    ],
)
@pytest.mark.parametrize("part", ["", "actor_update"])
def test_directories_without_a_dump_are_named_with_their_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: list[str], said: str, part: str
) -> None:
    """They count as absent, whether or not anything else can be compared."""
    for side in "bt":
        for place in ("step0/rank0", "step0/rank1", "step1/rank0", "step1/rank1"):
            at = tmp_path / side / "actor_update" / place
            dumps.write(at, {NAME: call([tensor()], [])})
            for beside in ("construct.json", "stack.json"):
                (at / beside).write_text("{}", encoding="utf-8")
    for place in lost:
        (tmp_path / "t/actor_update" / place / "dump.json").unlink()
    sides = [str(tmp_path / side / part) for side in "bt"]
    found = main(["compare", *sides, "-o", str(tmp_path / "o")])
    told = "".join(capsys.readouterr())
    if len(lost) == 4 and not part:  # such a tree holds no dump at all
        assert found == 1 and "t holds no dump" in told, told
        return
    assert found == 4
    line = next(line for line in told.splitlines() if "without dump.json" in line)
    assert said in line and line.count(f"in {tmp_path / 't/actor_update'}") == 1


@pytest.mark.parametrize("name", ["step_0", "Step0", "step-0", "step 0", "step00", "STEP0"])
def test_directories_that_are_nearly_called_so_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for side in "bt":
        dumps.write(tmp_path / side / name / "rank0", {NAME: call([tensor()], [])})
    assert main(["compare", *(str(tmp_path / n) for n in "bt"), "-o", str(tmp_path / "o")]) == 1
    assert f"It has a {name}, which msprobe would call step0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("odd", "name"),
    [("step0/rank_1", "rank_1"), ("step_1/rank0", "step_1"), ("step0/Rank1", "Rank1")],
)
def test_those_beside_others_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: str, name: str
) -> None:
    """What they hold is not read, and that is no silence."""
    for side in "bt":
        for place in ("step0/rank0", odd):
            dumps.write(tmp_path / side / "actor_update" / place, {NAME: call([tensor()], [])})
    for part in ("", "actor_update"):
        sides = [str(tmp_path / side / part) for side in "bt"]
        assert main(["compare", *sides, "-o", str(tmp_path / f"o{part}")]) == 0
        assert f"not read, as msprobe calls such directories otherwise: {name} (" in (
            capsys.readouterr().out
        )


def test_where_nothing_else_is_there_they_are_noted_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side in "bt":
        dumps.write(tmp_path / side / "step0/rank_1", {NAME: call([tensor()], [])})
    assert main(["compare", *(str(tmp_path / n) for n in "bt"), "-o", str(tmp_path / "o")]) == 4
    assert "rank_1 (rank1), in b" in capsys.readouterr().err


@pytest.mark.parametrize("norm", [-2.0, 0.5, 1e9])
def test_a_norm_that_cannot_be_is_not_called_round_off(tmp_path: Path, norm: float) -> None:
    """Sixteen elements of at most 1 have a norm of 1 to 4."""
    one, other = [tensor((1.0, -1.0, 0.0, norm))], [tensor((1.0, -1.0, 0.0, 2.0))]
    assert main([*command(tmp_path, one, other), "-q"]) == 0
    rows = pl.read_parquet(tmp_path / "o/unnamed/records.parquet")
    said = dict(rows.select("name", "reason").iter_rows())
    assert said[f"{NAME}.input.0"] == (
        "a norm is impossible beside its extremes and says nothing; nothing else differs"
    )


def test_a_norm_that_is_rounded_is(tmp_path: Path) -> None:
    one, other = [tensor((1.0, -1.0, 0.0, 2.0))], [tensor((1.0, -1.0, 0.0, 2.0 * (1 + 1e-7)))]
    assert main([*command(tmp_path, one, other), "-q"]) == 0
    rows = pl.read_parquet(tmp_path / "o/unnamed/records.parquet")
    said = dict(rows.select("name", "reason").iter_rows())
    assert said[f"{NAME}.input.0"] == ("statistics differ by no more than their own rounding")


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ({"dtype": "torch.float32", "shape": [2], "Max": 1.0}, "type is None, not a string"),
        (5, "a tensor, scalar, list or object was expected, found 5"),
        (["text"], "a tensor, scalar, list or object was expected, found 'text'"),
        ({"cfg": {"eps": 1e-6}}, "a tensor, scalar, list or object was expected, found 1e-06"),
    ],
)
def test_an_argument_that_is_none_costs_itself_and_no_other(
    tmp_path: Path, odd: Any, why: str
) -> None:
    given = [odd, tensor()]
    assert main(command(tmp_path, given, given)) == 4
    assert lacking(tmp_path) == {"cannot be read": (1, f"benchmark: {why}")}
    summary = json.loads((tmp_path / "o/unnamed/summary.json").read_text())
    assert summary["counts"] == dict.fromkeys(summary["counts"], 0) | {
        "matched": 2, "unreadable": 1,
    }  # fmt: skip


def test_arguments_called_as_the_keys_of_a_tensor_are_arguments(tmp_path: Path) -> None:
    given = [{"dtype": scalar("torch.float32"), "shape": tensor(), "type": tensor()}]
    assert main(command(tmp_path, given, given)) == 0
    assert lacking(tmp_path) == {}


@pytest.mark.parametrize("extra", ["Functional.relu.{}.forward", "Tensor.add.{}.forward"])
@pytest.mark.parametrize("more", ["benchmark", "target"])
def test_functions_that_one_side_alone_has_may_be_its_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, more: str
) -> None:
    one = {"Module.fc.Linear.forward.0": call([tensor()], [tensor()])}
    dumps.write(tmp_path / "L0", one)
    calls = {extra.format(n): call([tensor()], [tensor()]) for n in range(3)}
    dumps.write(tmp_path / "mix", one | calls)
    pair = [str(tmp_path / name) for name in ("L0", "mix")]
    pair = pair[::-1] if more == "benchmark" else pair
    assert main(["compare", *pair, "-o", str(tmp_path / "o")]) == 4
    kind = extra.partition(".")[0]
    said = capsys.readouterr().err
    assert f"all that only the {more} has are calls of functions ({kind})" in said
    assert "where the other side has none, dump both at one level" in said


@pytest.mark.parametrize("extra", ["Module.fc{}.Linear.forward.0", "Cell.fc{}.Dense.forward.0"])
@pytest.mark.parametrize("more", ["benchmark", "target"])
def test_modules_that_one_side_alone_has_may_be_its_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, more: str
) -> None:
    one = {"Functional.relu.0.forward": call([tensor()], [tensor()])}
    dumps.write(tmp_path / "L1", one)
    calls = {extra.format(n): call([tensor()], [tensor()]) for n in range(3)}
    dumps.write(tmp_path / "mix", one | calls)
    pair = [str(tmp_path / name) for name in ("L1", "mix")]
    pair = pair[::-1] if more == "benchmark" else pair
    assert main(["compare", *pair, "-o", str(tmp_path / "o")]) == 4
    said = capsys.readouterr().err
    assert f"all that only the {more} has are calls of modules ({extra.partition('.')[0]})" in said
    assert "(L1 has functions alone)" in said


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("Functional.softmax.0.forward", "NPU.npu_softmax.0.forward", "each other's counterparts"),
        ("Module.a.Linear.forward.0", "Cell.b.Dense.forward.0", "each other's counterparts"),
        ("Module.a.Linear.forward.0", "Functional.linear.0.forward", "at the same level"),
        ("Module.a.Linear.forward.0", "Module.b.Conv2d.forward.0", "are the same model"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_level_is_given_as_the_reason_where_it_may_be(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    one: str,
    other: str,
    said: str,
    turned: bool,
) -> None:
    names = (other, one) if turned else (one, other)
    for side, name, shape in zip("bt", names, ((2, 8), (4, 4)), strict=True):
        dumps.write(tmp_path / side, {name: call([tensor(shape=shape)], [])})
    pair = [str(tmp_path / side) for side in "bt"]
    assert main(["compare", *pair, "-o", str(tmp_path / "o")]) == 4
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("empty", ["{}", '{"data": null}', '{"task": "tensor", "data": {}}'])
def test_a_dump_without_records_is_said_to_be_msprobes_doing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: str
) -> None:
    words = command(tmp_path, [tensor()], [tensor()])
    (tmp_path / "t/step0/rank0/dump.json").write_text(empty)
    assert main(words) == 4
    said = capsys.readouterr().err
    assert "the target has no record at all" in said
    assert "nothing ran between start() and stop()" in said
    assert "name their differences in --rules" not in said


def test_a_flag_of_a_whole_call_is_called_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side, nan in (("b", 0), ("t", 1)):
        dumps.write(tmp_path / side, {NAME: call([tensor()], [tensor()]) | {"is_nan": nan}})
    main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o")])
    assert "input is_nan of Functional.linear differs" in capsys.readouterr().out
