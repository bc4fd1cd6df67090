"""Values on which a comparison is easily wrong: what it must say, and of their relatives.

``cases`` holds dumps as msprobe wrote them, ``b`` (or ``a``) the benchmark and ``t`` (or ``b``) the
target; ``elements/expected.json`` says what is right of each tensor ("positive": more than 0).
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor
from tests.unit.compare_helpers import CASES, Result, case, compared, compared_data

EXPECTED: dict[str, dict[str, Any]] = json.loads((CASES / "elements/expected.json").read_text())


@cache
def _elements(directory: Path) -> Result:
    return case("elements", directory)


@pytest.fixture(scope="module")
def elements(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return _elements(tmp_path_factory.mktemp("elements"))


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - {"u64_top"}))
def test_elements_are_compared_as_they_are(elements: Result, name: str) -> None:
    row = elements.row(f"{name}.0.debug")
    for key, right in EXPECTED[name].items():
        choices = right[0] if isinstance(right, list) else [right]
        assert any(_is(row[key], choice) for choice in choices), f"{key} is {row[key]}, not {right}"


def _is(found: Any, right: Any) -> bool:
    if right == "positive":
        return found is not None and found > 0
    if isinstance(right, float):
        return found is not None and math.isclose(found, right, rel_tol=2e-5)
    return bool(found == right)


def test_unsigned_integers_of_64_bits_are_exact(tmp_path: Path) -> None:
    for side, top in (("b", 2**64 - 1), ("t", 2**64 - 2)):
        _save(tmp_path / side, {"u64_top": torch.tensor([top, 5], dtype=torch.uint64)})
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row("u64_top.0.debug")
    assert row["status"] == "matched" and row["error"] > 0 and not row["identical"]
    assert row["max_abs_err"] == 1


def _save(directory: Path, values: dict[str, torch.Tensor], **more: Any) -> None:
    """Tensors as ``save()`` leaves them: a leaf without statistics and a file."""
    files = directory / "dump_tensor_data"
    files.mkdir(parents=True)
    data = {}
    for name, value in values.items():
        file = f"{name}.0.debug.pt"
        torch.save(value, files / file)
        leaf = tensor((None,) * 4, tuple(value.shape), str(value.dtype), data_name=file)
        data[f"{name}.0.debug"] = {**leaf, **more}
    dumps.write(directory, data, name="debug.json")


NAMES = ("i53", "seed", "big", "s", "numstr", "verstr", "b", "small", "tiny", "infs")


@pytest.mark.parametrize("name", NAMES)
def test_scalars_that_differ_are_never_identical(tmp_path: Path, name: str) -> None:
    row = case("scalars", tmp_path).row(f"Torch.f.0.forward.input.{name}")
    assert not row["identical"]
    assert row["error"] is None if name == "infs" else row["error"] > 0


def test_scalars_of_equal_value_have_no_error(tmp_path: Path) -> None:
    found = case("scalars", tmp_path)
    same = found.row("Torch.f.0.forward.input.same")
    zero, kind = (found.row(f"Torch.f.0.forward.input.{name}") for name in ("negz", "if"))
    assert same["identical"] and same["error"] == 0
    assert zero["error"] == 0 and not zero["identical"]
    assert (kind["status"], kind["error"], kind["identical"]) == ("dtype", 0, False)
    nan = found.row("Torch.f.0.forward.input.f")
    assert (nan["status"], nan["error"], nan["identical"]) == ("nonfinite", None, False)


@pytest.mark.parametrize(
    ("b", "t", "difference", "error"),
    [
        (-(10**40), -(10**40) - 7, -7.0, 7e-40),
        (2**64, 2.0**64, 0.0, 0.0),
        (0, 10**400, math.inf, 1.0),
        (True, 0, -1.0, 1.0),
        ("2026.1", "2026.10", None, 1.0),
        (5e-324, 1e-323, 5e-324, 1.0),
        (1.7e308, -1.7e308, -math.inf, 2.0),
    ],
)
def test_relatives_of_scalars(
    tmp_path: Path, b: Any, t: Any, difference: float | None, error: float
) -> None:
    data = [{"Torch.f.0.forward": call([scalar(value)], [])} for value in (b, t)]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.input.0")
    assert row["max_diff"] == difference
    assert row["error"] == pytest.approx(error, rel=1e-15, abs=0)
    assert not row["identical"]


@pytest.mark.parametrize(
    ("kind", "b", "t", "said"),
    [
        ("int", "1e400", "2e400", "more digits"),
        ("int", "1e400", "1e400", "more digits"),
        ("int64", "1e30", "1000000000000000000000000000001", "more digits"),
        ("uint8", "1.5", "1.5", "of type uint8 is 1.5"),
        ("int", "NaN", "NaN", "of type int is nan"),
        ("int", "-Infinity", "-Infinity", "of type int is -inf"),
    ],
)
def test_whole_numbers_of_which_digits_are_lost_are_not_compared(
    tmp_path: Path, kind: str, b: str, t: str, said: str
) -> None:
    """They read as equal: an infinity, a text, or a rounded number."""
    row = _written(tmp_path, kind, b, t)
    assert row["status"] == "unreadable" and said in row["reason"]
    assert row["error"] is None and not row["identical"]


@pytest.mark.parametrize(
    ("kind", "b", "t", "error"),
    [
        ("int", "1e5", "100001", 1e-5),
        ("int", "5.0", "5", 0.0),
        ("int32", "-2E3", "-2000.0", 0.0),
        ("float", "1e30", "1e30", 0.0),
    ],
)
def test_whole_numbers_written_with_an_exponent_are_what_they_mean(
    tmp_path: Path, kind: str, b: str, t: str, error: float
) -> None:
    row = _written(tmp_path, kind, b, t)
    assert row["status"] == "matched"
    assert row["error"] == pytest.approx(error, rel=1e-12)
    assert row["identical"] is (error == 0)


def _written(tmp_path: Path, kind: str, b: str, t: str) -> dict[str, Any]:
    """A scalar as the two texts stand in the files, beside one that is read."""
    for side, text in (("b", b), ("t", t)):
        leaves = [{"type": kind, "value": 12345}, scalar(1)]
        path = dumps.write(tmp_path / side, {"Torch.f.0.forward": call(leaves, [])})
        path.write_text(path.read_text().replace("12345", text))
    return compared(tmp_path / "b", tmp_path / "t", tmp_path / "o").row("Torch.f.0.forward.input.0")


@pytest.mark.parametrize("wide", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("factor", [-1.0, 3.0, -0.7])
def test_a_cosine_is_never_beyond_one(tmp_path: Path, wide: torch.dtype, factor: float) -> None:
    """Of multiples rounding puts it at 1 and a little more."""
    made = [torch.randn(7, 5, generator=torch.Generator().manual_seed(n)) for n in range(24)]
    values = {f"n{n}": tensor.to(wide) for n, tensor in enumerate(made)}
    _save(tmp_path / "b", values)
    _save(tmp_path / "t", {name: tensor * factor for name, tensor in values.items()})
    found = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    for name in values:
        cosine = found.row(f"{name}.0.debug")["cosine"]
        assert -1.0 <= cosine <= 1.0
        assert cosine == pytest.approx(math.copysign(1.0, factor), abs=1e-6)


@pytest.mark.parametrize("digits", [641, 4301, 20_000])
@pytest.mark.parametrize(("last", "difference"), [("1", 1.0), ("0", 0.0)])
def test_whole_numbers_longer_than_python_reads(
    tmp_path: Path, digits: int, last: str, difference: float
) -> None:
    """They were texts, whose error is 1: above the truth."""
    for side, end in (("b", "0"), ("t", last)):
        path = dumps.write(tmp_path / side, {"Torch.f.0.forward": call([scalar(12345)], [])})
        path.write_text(path.read_text().replace("12345", "-1" + "0" * (digits - 2) + end))
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "o").row("Torch.f.0.forward.input.0")
    assert row["max_diff"] == -difference and row["identical"] is (difference == 0)
    assert (row["error"] == 0) is (difference == 0) and row["error"] < 1e-300


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return case("elements_statistics", tmp_path_factory.mktemp("statistics"))


def test_no_bound_from_statistics_is_above_what_the_elements_say(
    elements: Result, statistics: Result
) -> None:
    bounds = 0
    for row in statistics.records.iter_rows(named=True):
        if row["name"] not in set(elements.records["name"]):
            continue
        true = elements.row(row["name"])["error"]
        if row["error"] is not None and true is not None:
            bounds += row["error"] > 0
            assert row["error"] <= true * (1 + 1e-12), row["name"]
        assert not row["identical"] or row["shape_benchmark"] == [0, 3]
    assert bounds > 15


def test_statistics_that_agree_are_not_identity(statistics: Result) -> None:
    row = statistics.row("perm.0.debug")
    assert (row["error"], row["identical"], row["reason"]) == (0, False, "no difference seen")
    large = statistics.row("i64_2p60_all.0.debug")
    assert large["max_diff"] == 1 and large["error"] > 0


@pytest.mark.parametrize(
    ("b", "t", "true"),
    [
        # norm rounded to bfloat16: 4.25 stands for up to 4.2666
        ((4.25, 0.0, None, 4.25), (4.0, 0.0, None, 4.0), 0.25 / 4.25),
        # norm lost to underflow, overflowed, absent
        ((1e-40, 1e-40, None, 0.0), (2e-40, 2e-40, None, 0.0), 1.0),
        ((1e30, 1e30, None, math.inf), (3e30, 3e30, None, math.inf), 2.0),
        ((1e-300, -1e-300, None, None), (4e-300, -1e-300, None, None), 3 / math.sqrt(2)),
    ],
)
def test_relatives_of_bounds(tmp_path: Path, b: Any, t: Any, true: float) -> None:
    data = [
        {"Torch.f.0.forward": call([], [tensor(values, (4,), "torch.bfloat16")])}
        for values in (b, t)
    ]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")
    assert 0 < row["error"] <= true


def test_integer_extremes_around_2_to_the_53_are_exact(tmp_path: Path) -> None:
    tops = {"f": 2**53 + 1, "g": -(2**53) - 5, "h": 2**63 - 1, "k": -(2**60)}
    data: list[dict[str, Any]] = [
        {
            f"Torch.{name}.0.forward": call(
                [], [tensor((top + n, top + n - 1, None, None), (2,), "torch.int64")]
            )
            for name, top in tops.items()
        }
        for n in (0, -1)
    ]
    found = compared_data(tmp_path, *data)
    for name in tops:
        row = found.row(f"Torch.{name}.0.forward.output.0")
        assert (
            row["max_diff"] == row["min_diff"] == -1 and row["error"] > 0 and not row["identical"]
        )


def test_nan_statistics_say_nothing_of_the_rest(tmp_path: Path) -> None:
    row = case("nan_statistics_same", tmp_path).row("Module.a.Linear.forward.0.output.0")
    assert (row["status"], row["reason"]) == ("nonfinite", "both")
    assert row["error"] is None and not row["identical"]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ((math.nan, -1.0, math.nan, math.nan), None),
        ((1.0, math.nan, 0.0, 1.0), None),
        ((math.inf, -1.0, math.inf, math.inf), None),
        ((0.0, -math.inf, -math.inf, math.inf), None),
        ((1.0, -1.0, math.nan, 2.0), None),
        ((1.0, -1.0, 0.0, math.nan), None),
    ],
)
def test_relatives_of_nan_statistics(tmp_path: Path, values: Any, error: float | None) -> None:
    data = {"Torch.f.0.forward": call([], [tensor(values)])}
    row = compared_data(tmp_path, data, data).row("Torch.f.0.forward.output.0")
    assert (row["status"], row["error"], row["identical"]) == ("nonfinite", error, False)


def test_empty_tensors_are_equal(tmp_path: Path) -> None:
    found = case("identical_with_empty_tensors", tmp_path)
    assert found.lack is None
    assert found.summary["coverage"] == {"benchmark": 1, "target": 1}
    assert found.summary["identical"] == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "status", "identical"),
    [
        ((0, 3), "torch.float32", "matched", True),
        ((0, 3), "torch.float16", "dtype", False),
        ((3, 0), "torch.float32", "shape", False),
    ],
)
def test_relatives_of_empty_tensors(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, status: str, identical: bool
) -> None:
    leaves = [
        tensor((None,) * 4, (0, 3)),
        tensor((None,) * 4, shape, dtype),
    ]
    data = [{"Torch.f.0.forward": call([], [leaf])} for leaf in leaves]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")
    assert (row["status"], row["identical"]) == (status, identical)


def test_null_statistics_are_named_and_counted(tmp_path: Path) -> None:
    found = case("null_statistics_without_reason", tmp_path, "a", "b")
    lacking = found.summary["not_compared"]
    assert [(one["reason"], one["records"]) for one in lacking] == [
        ("the target has no statistics", 8)
    ]
    assert found.lack is not None and lacking[0]["first"] in str(found.lack)
    assert found.row(lacking[0]["first"])["reason"] == "the target has no statistics"


@pytest.mark.parametrize(
    ("b", "t", "reason"),
    [
        ((None,) * 4, (1.0, 0.0, None, None), "the benchmark has no statistics"),
        ((None,) * 4, (None,) * 4, "neither side has statistics"),
        ((1.0, 0.0, None, None), (None, None, 0.5, 1.0), "no statistic is on both sides"),
    ],
)
def test_relatives_of_null_statistics(tmp_path: Path, b: Any, t: Any, reason: str) -> None:
    data = [{"Torch.f.0.forward": call([], [tensor(values)])} for values in (b, t)]
    found = compared_data(tmp_path, *data)
    row = found.row("Torch.f.0.forward.output.0")
    assert row["reason"] == reason and row["error"] is None and row["error_kind"] is None
    assert found.summary["coverage"]["target"] == 0


def test_xor_checksums_that_differ_are_counted(tmp_path: Path) -> None:
    found = case("xor_differences_invisible", tmp_path, "a", "b")
    assert found.summary["checksums"] == {"compared": 67, "differ": 38}
    assert found.summary["max_error"] is None and found.summary["compared"] == 0
    assert found.lack is not None and "38 of 67 checksums differ" in str(found.lack)
    differing = [one for one in found.summary["not_compared"] if one["records"] == 38]
    assert differing[0]["reason"] == "checksums differ; there are no statistics"


def test_xor_checksums_that_agree_prove_nothing(tmp_path: Path) -> None:
    found = case("xor_differences_invisible", tmp_path, "a", "a")
    assert found.summary["checksums"] == {"compared": 67, "differ": 0}
    assert found.summary["max_error"] is None and found.summary["identical"] == 0


@pytest.mark.parametrize(
    ("b", "t", "identical", "reason"),
    [
        ({"md5": "0000abcd"}, {"md5": "0000abcd"}, True, None),
        ({"md5": "0000abcd"}, {"md5": "0000abce"}, False, "only tensors can tell"),
        # kinds that say nothing of one another
        ({"md5": "0000abcd"}, {"Digest": f"sha256:{'a' * 64}"}, False, "no difference seen"),
        # equal, but the extremes are not
        ({"md5": "0000abcd"}, {"md5": "0000abcd", "Max": 3.0}, False, "one of them is wrong"),
    ],
)
def test_relatives_of_checksums(
    tmp_path: Path, b: dict[str, Any], t: dict[str, Any], identical: bool, reason: str | None
) -> None:
    data = [{"Torch.f.0.forward": call([], [{**tensor(), **keys}])} for keys in (b, t)]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")
    assert row["identical"] == identical
    assert (row["reason"] or "") == "" if reason is None else reason in row["reason"]


def test_scales_of_mx_formats_are_read(tmp_path: Path) -> None:
    from rlprobe.dumps.tensors import dtypes
    from rlprobe.dumps.tensors.tensorfile import map_file, read_tensor

    path = next((CASES / "e8m0_scales_unreadable").glob("*.pt"))
    file = read_tensor(map_file(path), path.name)
    (raw,) = file.blocks(100)
    values = dtypes.numbers(raw, file.dtype, wide=True)
    codes = raw.tolist()
    right = [math.nan if code == 255 else 2.0 ** (code - 127) for code in codes]
    assert values.tolist() == pytest.approx(right, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float4_e2m1fn_x2], ids=str)
def test_mx_formats_are_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.tensor([0x12, 0x34, 0x7F], dtype=torch.uint8)
    other = codes.clone()
    other[1] = 0x35
    for side, raw in (("b", codes), ("t", other)):
        _save(tmp_path / side, {"x": raw.view(dtype)})
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row("x.0.debug")
    assert row["status"] == "matched" and row["error"] > 0
    assert (row["max_abs_index"], row["ulp_max"]) == (1, 1)
    # 2**(0x34 - 127) once more, or 2 against 3
    step = 2.0 ** (0x34 - 127) if dtype == torch.float8_e8m0fnu else 1.0
    assert row["max_abs_err"] == step


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ({"dtype": "torch.float16"}, "it holds float32, the record says float16"),
        ({"shape": [3, 2]}, "the record says [3, 2]"),
        ({"dtype": "torch.int32"}, "it holds float32, the record says int32"),
    ],
)
def test_a_record_that_its_file_contradicts_is_unreadable(
    tmp_path: Path, recorded: dict[str, Any], said: str
) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    _save(tmp_path / "b", {"x": x}, **recorded)
    _save(tmp_path / "t", {"x": x}, **recorded)
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row("x.0.debug")
    assert row["status"] == "unreadable" and said in row["reason"]


def test_a_complex_benchmark_of_zeros_differs_by_all_of_the_target(tmp_path: Path) -> None:
    data: list[dict[str, Any]] = [
        {"Torch.f.0.forward": call([], [tensor((top, top, top, None), (3,), "torch.complex64")])}
        for top in (0.0, 2.0)
    ]
    assert compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")["error"] == 1


@pytest.mark.parametrize("known", [{}, {"md5": "1a2b3c4d"}, {"Max": 2, "Min": 1, "Norm": 3}])
def test_elements_that_were_read_have_no_reason_of_statistics(tmp_path: Path, known: Any) -> None:
    for side, values in (("b", [1.0, 2.0]), ("t", [2.0, 1.0])):
        own = {**known, "md5": f"{side}0"} if "md5" in known else known
        _save(tmp_path / side, {"x": torch.tensor(values)}, **own)
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row("x.0.debug")
    assert (row["error_kind"], row["reason"]) == ("tensor", None)
    assert row["error"] == pytest.approx(math.sqrt(2 / 5))


@pytest.mark.parametrize(
    ("b", "t", "share"), [(1e308, -1e308, 2.0), (-1.5e308, 1.5e308, 2.0), (1e308, -1.7e308, 2.7)]
)
def test_a_difference_that_overflows_has_a_finite_share(
    tmp_path: Path, b: float, t: float, share: float
) -> None:
    for side, value in (("b", b), ("t", t)):
        _save(tmp_path / side, {"x": torch.tensor([1.0, value], dtype=torch.float64)})
    row = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out").row("x.0.debug")
    assert row["max_rel_err"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("b", "t", "true"),
    [
        # sixteen elements of which Norm says nothing that could be true
        ((3.0, -1.0, 0.5, 0.0), (3.0, -1.0, 0.5, 6.0), 8.0),
        ((3.0, -1.0, None, 6.0), (3.5, -1.0, None, 0.0), 8.0),
        ((1.0, -1.0, None, 1e9), (1.0, -1.0, None, 2.0), 8.0),
        ((2.0, 2.0, 2.0, 0.0), (4.0, 4.0, 4.0, 16.0), 1.0),
    ],
)
def test_a_norm_that_the_extremes_contradict_bounds_nothing(
    tmp_path: Path, b: Any, t: Any, true: float
) -> None:
    data = [{"Torch.f.0.forward": call([], [tensor(values, (2, 8))])} for values in (b, t)]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")
    assert row["error"] is not None and row["error"] <= true


@pytest.mark.parametrize("place", [2, 3])
@pytest.mark.parametrize("side", ["benchmark", "target"])
def test_a_mean_or_norm_that_is_nan_on_one_side_is_not_finite(
    tmp_path: Path, place: int, side: str
) -> None:
    odd: Any = tuple(math.nan if n == place else v for n, v in enumerate((1.0, -1.0, 0.25, 2.0)))
    data = [
        {"Torch.f.0.forward": call([], [tensor(odd if side == own else (1.0, -1.0, 0.25, 2.0))])}
        for own in ("benchmark", "target")
    ]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")
    assert (row["status"], row["reason"], row["error"]) == ("nonfinite", side, None)


def test_a_norm_that_overflows_on_one_side_says_nothing(tmp_path: Path) -> None:
    data = [
        {"Torch.f.0.forward": call([], [tensor((1e30, -1e30, 0.0, norm), (4,))])}
        for norm in (math.inf, 2e30)
    ]
    row = compared_data(tmp_path, *data).row("Torch.f.0.forward.output.0")
    assert (row["status"], row["error"]) == ("matched", None) and "overflowed" in row["reason"]


def test_an_infinite_mean_of_small_values_is_not_finite(tmp_path: Path) -> None:
    data = [
        {"Torch.f.0.forward": call([], [tensor((1.0, -1.0, mean, 2.0))])}
        for mean in (0.25, math.inf)
    ]
    assert compared_data(tmp_path, *data).status("Torch.f.0.forward.output.0") == "nonfinite"
