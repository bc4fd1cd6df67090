"""What the screen says of the first record that parts, and is it known that way?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe.cli import main
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor

PLACE = "actor_update/step0/rank0"
CONV = "Module.model.proj.Conv1d.forward.0"


def leaf(top: float = 1.0, **more: Any) -> dict[str, Any]:
    return tensor((top, -top, 0.1 * top, 2 * top), (4, 8), **more)


def ids(top: float = 9.0, **more: Any) -> dict[str, Any]:
    return tensor((top, 0.0, None, None), (4, 8), "torch.int64", **more)


def unmeasured() -> dict[str, Any]:
    return tensor((None, None, None, None), (4, 8))


def screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sides: tuple[Any, Any], *more: str
) -> tuple[int, str, str]:
    """The exit code and what was printed of two dumps."""
    for side, data in zip("bt", sides, strict=True):
        if not (tmp_path / side).exists():
            dumps.write(tmp_path / side / PLACE, data)
    code = main(["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / "o"),
                 "--coverage", "0", *more])  # fmt: skip
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (([], []), "the output differs; no input of the call was recorded"),
        (([unmeasured()], [leaf()]), "the output differs; of what the call was given nothing was"),
        (([leaf(), unmeasured()], [leaf(), leaf()]), "the output does not; input.1 was not "
         "measured"),
        (([ids()], [ids()]), "of the whole numbers in input.0 they know the largest and the "
         "smallest alone: other ids of tokens"),
        (([leaf(), ids(), ids()], [leaf(), ids(), ids()]), "in input.1, input.2 they know"),
        (([leaf()], [leaf()]), "inputs agree within noise as far as statistics see, and"),
        (([ids(md5="1a2b3c4d")], [ids(md5="1a2b3c4d")]), "  inputs agree within noise and the "
         "output does not"),
        (([leaf(md5="1a2b3c4d")], [leaf(md5="1a2b3c4d")]), "  inputs agree within noise and the "
         "output does not"),
    ],
)  # fmt: skip
def test_inputs_are_said_to_agree_as_far_as_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inputs: tuple[Any, Any], said: str
) -> None:
    sides = tuple(
        {"Functional.embedding.0.forward": call(given, [leaf(made)])}
        for given, made in zip(inputs, (2.0, 2.2), strict=True)
    )
    code, out, _ = screen(tmp_path, capsys, (sides[0], sides[1]))
    assert code == 0 and out.startswith("First to part: Functional.embedding")
    assert said in out


def within(weight: float, other: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module whose function is given its weight, and what construct.json says of them."""
    function = "Functional.conv1d.0.forward"
    data = {
        "Module.model.norm.Norm.forward.0": call(
            [leaf()], [leaf()], parameters={"weight": leaf(other)}
        ),
        function: call([leaf(), leaf(weight)], [leaf(2.0 * weight)]),
        CONV: call([leaf()], [leaf(2.0 * weight)], parameters={"weight": leaf(weight)}),
    }
    return data, {function: CONV, CONV: None, "Module.model.norm.Norm.forward.0": None}


@pytest.mark.parametrize(
    ("own", "recorded", "said"),
    [
        (1.01, True, f"{CONV}.parameters.weight differs too: other weights, not other code"),
        # the module was not given other weights: what it hands on is its own
        (1.01, False, "the code of model.proj itself"),
    ],
)
def test_a_weight_that_differs_is_not_its_modules_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: float, recorded: bool, said: str
) -> None:
    for side, weight in (("b", 1.0), ("t", own)):
        data, around = within(weight, other=1.0 if recorded else weight)
        if not recorded:
            del data[CONV]["parameters"]
        dumps.write(tmp_path / side / PLACE, data)
        (tmp_path / side / PLACE / "construct.json").write_text(json.dumps(around))
    _, out, _ = screen(tmp_path, capsys, ({}, {}))
    assert out.startswith("First to part: model.proj (Conv1d)")
    assert said in out and out.count("itself") == (not recorded)


@pytest.mark.parametrize("dtype", ["torch.complex64", "torch.complex128"])
@pytest.mark.parametrize(("wrong", "parts"), [(1, False), (1 << 14, True)])
def test_complex_results_have_the_round_off_of_their_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, wrong: int, parts: bool
) -> None:
    """A rotary embedding or a Fourier transform that is a unit in the last place off is none."""
    kind = np.dtype(dtype.removeprefix("torch."))
    real = np.dtype(f"f{kind.itemsize // 2}")
    values = np.random.default_rng(0).standard_normal((2, 64)).astype(real)
    exact = (values[0] + 1j * values[1]).astype(kind)
    moved = exact * (1 + wrong * np.finfo(real).eps)
    for side, array in (("b", exact), ("t", moved.astype(kind))):
        name = "Functional.fft.0.forward.output.0.npy"
        given = tensor((None,) * 4, (64,), "torch.float32")
        made = tensor((None,) * 4, (64,), dtype, data_name=name)
        dumps.write(tmp_path / side / PLACE, {"Functional.fft.0.forward": call([given], [made])},
                    task="tensor")  # fmt: skip
        (tmp_path / side / PLACE / "dump_tensor_data").mkdir()
        np.save(tmp_path / side / PLACE / "dump_tensor_data" / name, array)
    _, out, _ = screen(tmp_path, capsys, ({}, {}))
    assert "there is no round-off in it" not in out
    assert out.startswith("First to part" if parts else "Nothing parts")


def in_format(dtype: str, weight: float = 1.0) -> dict[str, Any]:
    return {"Functional.embedding.0.forward": call([ids()], [])} | {
        f"Module.model.layers.{n}.mlp.MLP.forward.0": call(
            [leaf(1.5, dtype=dtype)],
            [leaf(2.0, dtype=dtype)],
            parameters={"weight": leaf(weight, dtype=dtype)},
        )
        for n in range(4)
    }


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
@pytest.mark.parametrize("coarser", ["b", "t"])
def test_weights_that_were_rounded_are_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, coarser: str
) -> None:
    sides = (in_format("torch.float32", 1.0003), in_format(dtype))
    own = sides if coarser == "t" else sides[::-1]
    code, out, _ = screen(tmp_path, capsys, own, "--coverage", "0.9")
    assert code == 4
    assert "they were not given the same" not in out
    assert "  they are of other formats: 12 records, first Module.model.layers.0.mlp" in out
    # and no verdict is "aligned" of them
    assert main(["diagnose", str(tmp_path / "o")]) == 4
    gate = json.loads((tmp_path / "o/diagnosis.json").read_text())["gate"]
    states = {item["item"]: item["state"] for item in gate}
    assert (states["weights"], states["precision"]) == ("open", "shut")


def test_other_weights_are_seen_beside_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = (in_format("torch.float32", 1.02), in_format("torch.bfloat16"))
    _, out, _ = screen(tmp_path, capsys, sides)
    assert "4 of 4 recorded parameters differ" in out


def test_a_few_records_of_another_format_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An autocast that is left on in one module of many."""
    data = {f"Module.model.layers.{n}.mlp.MLP.forward.0": call([leaf(1.5)], [leaf(2.0)])
            for n in range(20)}  # fmt: skip
    target = data | {"Module.model.layers.7.mlp.MLP.forward.0": call(
        [leaf(1.5)], [leaf(2.0, dtype="torch.bfloat16")])}  # fmt: skip
    assert screen(tmp_path, capsys, (data, target), "--coverage", "0.9")[0] == 0
    main(["diagnose", str(tmp_path / "o")])
    gate = json.loads((tmp_path / "o/diagnosis.json").read_text())["gate"]
    (item,) = [item for item in gate if item["item"] == "precision"]
    assert item["state"] == "caveat"
    assert "1 record has another format, first Module.model.layers.7.mlp" in item["evidence"]


@pytest.mark.parametrize("other", [True, False])
def test_weights_of_which_checksums_alone_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: bool
) -> None:
    def data(weight: int) -> dict[str, Any]:
        bare = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 8]}
        given = call(
            [bare | {"md5": f"{1:#018x}"}], [bare | {"md5": f"{weight:#018x}"}],
            parameters={"weight": bare | {"md5": f"{weight:#018x}"}},
        )  # fmt: skip
        known = call([scalar(1)], [])
        return {"Module.model.mlp.MLP.forward.0": given, "Functional.silu.0.forward": known}

    for side, weight in (("b", 2), ("t", 3 if other else 2)):
        dumps.write(tmp_path / side / PLACE, data(weight))
    _, out, _ = screen(tmp_path, capsys, ({}, {}))
    assert ("1 of 1 recorded parameter differs" in out) == other
    main(["diagnose", str(tmp_path / "o")])
    gate = {
        item["item"]: item
        for item in json.loads((tmp_path / "o/diagnosis.json").read_text())["gate"]
    }
    assert gate["weights"]["state"] == ("shut" if other else "caveat")
    assert "no parameters were recorded" not in gate["weights"]["evidence"]
    assert "checksums and no statistics: of 3 records" in gate["capture"]["evidence"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["benchmark", "target"])
def test_a_lone_record_that_is_not_finite_is_lone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, side: str
) -> None:
    """It is on one side alone: which side is not finite is no reason that it was not compared."""
    plain = {"Functional.silu.0.forward": call([leaf()], [leaf()])}
    more = plain | {"Functional.masked.0.forward": call([leaf()], [leaf(value)])}
    _, out, _ = screen(tmp_path, capsys, (more, plain) if side == "benchmark" else (plain, more))
    other = "target" if side == "benchmark" else "benchmark"
    assert f"2 records: the {other} has no such record; first: Functional.masked" in out


@pytest.mark.parametrize("tables", [["--table", "both"], []])
@pytest.mark.parametrize("sides", ["t", "bt"])
def test_a_file_that_cannot_be_read_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tables: list[str], sides: str
) -> None:
    for side, top in (("b", 2.0), ("t", 2.2)):
        data = {f"Functional.silu.{n}.forward": call([leaf()], [leaf(top)]) for n in range(3)}
        dumps.write(tmp_path / side / PLACE, data, stack=True)
        if side in sides:
            for name in ("stack.json", "construct.json"):
                (tmp_path / side / PLACE / name).write_text("{bad")
    _, out, err = screen(tmp_path, capsys, ({}, {}), "--stacks", *tables)
    for side in sides:
        assert err.count(f"{tmp_path / side / PLACE / 'stack.json'} is not an msprobe") == 1
        assert err.count(f"{tmp_path / side / PLACE / 'construct.json'} is not an msprobe") <= 1
    assert "no stack was recorded" not in out
    assert f"{'both sides' if len(sides) > 1 else 'target'}: its stacks cannot be read" in out


def test_one_reason_of_both_sides_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "Functional.silu.0.forward.output.0.npy"
    made = tensor((None,) * 4, (4,), data_name=name)
    for side in "bt":
        dumps.write(tmp_path / side / PLACE, {"Functional.silu.0.forward": call([], [made])},
                    task="tensor")  # fmt: skip
        (tmp_path / side / PLACE / "dump_tensor_data").mkdir()
    _, _, err = screen(tmp_path, capsys, ({}, {}), "--no-fail")
    assert "(both sides: file is missing)" in err


@pytest.mark.parametrize("out", ["file", "file/below", "file/further/below"])
def test_a_file_is_no_directory_of_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    for side in "bt":
        dumps.write(tmp_path / side / PLACE, {"Functional.silu.0.forward": call([], [leaf()])})
    (tmp_path / "file").write_text("mine")
    command = ["compare", str(tmp_path / "b"), str(tmp_path / "t"), "-o", str(tmp_path / out)]
    assert main(command) == 2
    assert f"{tmp_path / 'file'} is a file" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("value", ["loss", "hidden"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_saved_value_is_saved_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, nested: bool
) -> None:
    """No list of msprobe's chooses it, and no stack has its call."""
    for side, top in (("b", 1.0), ("t", 1.5)):
        own = {"q": [leaf(top)]} if nested else leaf(top)
        dumps.write(tmp_path / side / PLACE, {f"{value}.0.debug": own}, name="debug.json")
    _, out, _ = screen(tmp_path, capsys, ({}, {}))
    assert "save it again on both sides with task tensor" in out
    assert " list [" not in out and "--stacks" not in out


@pytest.mark.parametrize(("prefix", "rule"), [("module", "wrappers"), ("actor", "common_prefix")])
def test_rules_that_joined_records_are_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefix: str, rule: str
) -> None:
    named = {p: {f"Module.{p}layers.{n}.mlp.MLP.forward.0": call([leaf()], [leaf()])
                 for n in range(4)} for p in ("", f"{prefix}.")}  # fmt: skip
    _, out, _ = screen(tmp_path, capsys, (named[""], named[f"{prefix}."]))
    assert f"  actor_update: joined by rules, not by name: {rule} 8" in out
    _, out, _ = screen(tmp_path / "same", capsys, (named[""], named[""]))
    assert "joined by rules" not in out


@pytest.mark.parametrize("slots", [["scratch"], ["scratch", "weird"]])
def test_slots_that_nobody_knows_are_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slots: list[str]
) -> None:
    for side in "bt":
        for rank in range(3):
            entry = call([leaf()], [leaf()]) | {slot: [leaf()] for slot in slots}
            place = tmp_path / side / f"actor_update/step0/rank{rank}"
            dumps.write(place, {"Functional.silu.0.forward": entry})
    _, out, err = screen(tmp_path, capsys, ({}, {}))
    assert (out + err).count("scratch") == 1
    (note,) = [line for line in out.splitlines() if "compared like any other: " in line]
    assert all(f"{slot} (3)" in note for slot in slots)
