"""Does a dump file become the rows msprobe's own table has, and is a hostile one refused?"""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlprobe.dumps import dumpjson
from rlprobe.dumps.schema import LEAF_SCHEMA
from rlprobe.errors import DumpError
from tests.msprobe import dumps
from tests.msprobe.dumps import call, scalar, tensor


def read(directory: Path, data: Any, name: str = "dump.json") -> pl.DataFrame:
    return dumpjson.read(dumps.write(directory, data, name=name))


def one(directory: Path, data: Any, name: str = "dump.json") -> dict[str, Any]:
    return read(directory, data, name).row(0, named=True)


def test_rows_are_named_and_ordered_as_msprobes(tmp_path: Path) -> None:
    entry = {
        **call([tensor(), [tensor(), None]], [tensor()], parameters={"weight": tensor()}),
        "input_kwargs": {"mask": tensor(), "pair": [tensor(), {"deep": tensor()}]},
    }
    frame = read(tmp_path, {"Module.model.norm.RMSNorm.forward.2": entry})
    head = "Module.model.norm.RMSNorm.forward.2."
    assert frame["name"].to_list() == [
        head + end
        for end in (
            "input.0",
            "input.1.0",
            "input.1.1",
            "input.mask",
            "input.pair.0",
            "input.pair.1.deep",
            "parameters.weight",
            "output.0",
        )
    ]
    assert frame.schema == LEAF_SCHEMA
    assert frame["slot"].to_list() == ["input"] * 6 + ["parameters", "output"]
    assert frame["index"].to_list()[4:6] == ["pair.0", "pair.1.deep"]


@pytest.mark.parametrize(
    ("name", "module", "op", "called", "direction"),
    [
        ("Functional.linear.7.forward", None, "Functional.linear", 7, "forward"),
        ("Tensor.__add__.0.backward", None, "Tensor.__add__", 0, "backward"),
        ("Module.model.norm.RMSNorm.forward.3", "model.norm", "RMSNorm", 3, "forward"),
        ("Module.lm_head.Linear.backward.0", "lm_head", "Linear", 0, "backward"),
        ("Module.Qwen2ForCausalLM.forward.0", "", "Qwen2ForCausalLM", 0, "forward"),
        ("Module.model.FSDPQwen2Model.forward.0", "model", "Qwen2Model", 0, "forward"),
        ("Module.module.fc.Linear.forward.0", "fc", "Linear", 0, "forward"),
        ("Module.0.module.module.fc.Linear.forward.0", "fc", "Linear", 0, "forward"),
        ("Distributed.all_reduce.1.forward", None, "Distributed.all_reduce", 1, "forward"),
        ("NPU.npu_rms_norm.4.forward", None, "NPU.npu_rms_norm", 4, "forward"),
    ],
)
def test_names_are_taken_apart(
    tmp_path: Path, name: str, module: str | None, op: str, called: int, direction: str
) -> None:
    entry = call([], [tensor()]) if direction == "forward" else {"input": [tensor()], "output": []}
    row = one(tmp_path, {name: entry})
    found = tuple(row[key] for key in ("module", "op", "call", "direction"))
    assert found == (module, op, called, direction)


def test_chunks_keep_their_numbers_when_there_are_several(tmp_path: Path) -> None:
    names = [f"Module.{chunk}.decoder.layers.0.Layer.forward.0" for chunk in (0, 1)]
    frame = read(tmp_path, {name: call([], [tensor()]) for name in names})
    assert frame["module"].to_list() == ["0.decoder.layers.0", "1.decoder.layers.0"]


@pytest.mark.parametrize(
    "name", ["Module.fc.Linear.parameters_grad.0", "Module.fc.Linear.parameters_grad"]
)
def test_gradients_of_parameters(tmp_path: Path, name: str) -> None:
    row = one(tmp_path, {name: {"weight": [tensor()]}})
    assert row["name"] == f"{name}.weight"
    found = tuple(row[key] for key in ("module", "op", "direction", "slot", "index"))
    assert found == ("fc", "Linear", "backward", "grad", "weight")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "model.layers.0.mlp.up_proj.weight.grad.0.debug",
            ("model.layers.0.mlp.up_proj", "Parameter", "update", "grad", "weight", 0),
        ),
        (
            "module._fsdp_wrapped_module.lm_head.weight.grad_reduced.1.debug",
            ("lm_head", "Parameter", "update", "grad_reduced", "weight", 1),
        ),
        ("scale.change.0.debug", ("", "Parameter", "update", "change", "scale", 0)),
        ("loss.policy.2.debug", (None, "loss", "forward", "loss", "policy", 2)),
        ("logits.0.debug", (None, "save.logits", "forward", "output", "", 0)),
        ("a.b.0.debug", (None, "save.a.b", "forward", "output", "", 0)),
    ],
)
def test_debug_names(tmp_path: Path, name: str, expected: tuple[Any, ...]) -> None:
    row = one(tmp_path, {name: tensor()}, "debug.json")
    found = tuple(row[key] for key in ("module", "op", "direction", "slot", "index", "call"))
    assert found == expected
    assert row["name"] == name


def test_a_saved_structure_is_one_row_per_leaf(tmp_path: Path) -> None:
    frame = read(tmp_path, {"s.0.debug": {"a": tensor(), "b": [tensor(), scalar(3)]}}, "debug.json")
    assert frame["name"].to_list() == ["s.0.debug.a", "s.0.debug.b.0", "s.0.debug.b.1"]
    assert frame["index"].to_list() == ["a", "b.0", "b.1"]


@pytest.mark.parametrize(
    ("leaf", "dtype", "value"),
    [
        (scalar(3), "int", "3"),
        (scalar(0.5), "float", "0.5"),
        (scalar(True), "bool", "True"),
        (scalar("NaN"), "str", "NaN"),
        (scalar(math.inf), "float", "inf"),
        (scalar(math.nan), "float", "nan"),
        (scalar("torch.float32", "torch.dtype"), "torch.dtype", "torch.float32"),
        (scalar([2, 3], "torch.Size"), "torch.Size", "[2, 3]"),
        (scalar([None, 2, None], "slice"), "slice", "[None, 2, None]"),
        (None, None, None),
    ],
)
def test_scalars(tmp_path: Path, leaf: Any, dtype: str | None, value: str | None) -> None:
    row = one(tmp_path, {"Functional.f.0.forward": call([leaf], [])})
    assert (row["dtype"], row["value"], row["shape"]) == (dtype, value, None)


def test_statistics_of_every_kind_of_tensor(tmp_path: Path) -> None:
    leaves = [
        tensor((math.nan, -math.inf, math.inf, 1.0)),
        tensor((True, False, None, None), dtype="torch.bool"),
        tensor((127, -3, None, None), dtype="torch.int64"),
        tensor((None, None, None, None), (0, 4)),
        tensor((2.0, 2.0, 2.0, 2.0), ()),
    ]
    frame = read(tmp_path, {"Functional.f.0.forward": call(leaves, [])})
    assert math.isnan(frame["max"][0]) and frame["min"][0] == -math.inf
    assert frame["mean"][0] == math.inf
    assert frame["max"].to_list()[1:] == [1.0, 127.0, None, 2.0]
    assert frame["shape"].to_list() == [[2, 8], [2, 8], [2, 8], [0, 4], []]


def test_integers_beyond_float64_are_kept_exactly(tmp_path: Path) -> None:
    big = 2**62 + 1
    row = one(
        tmp_path,
        {"Functional.f.0.forward": call([tensor((big, 0, None, None), dtype="torch.int64")], [])},
    )
    assert json.loads(row["value"]) == {"Max": big, "Min": 0}


@pytest.mark.parametrize(
    ("keys", "digest"),
    [
        ({"md5": "762beb0e"}, "crc32:762beb0e"),
        ({"md5": "00000000"}, None),
        ({"md5": "0xfe15"}, "xor:0x000000000000fe15"),
        ({"md5": "0X000000000000FE15"}, "xor:0x000000000000fe15"),
        ({"md5": "762BEB0E"}, "crc32:762beb0e"),
        ({"md5": "beb0e"}, "crc32:000beb0e"),
        ({"md5": 4.5}, "xor:4.5"),
        ({"Digest": "sha256:" + "a" * 64, "md5": "762beb0e"}, "sha256:" + "a" * 64),
        ({}, None),
    ],
)
def test_checksums(tmp_path: Path, keys: dict[str, Any], digest: str | None) -> None:
    row = one(tmp_path, {"Functional.f.0.forward": call([tensor(**keys)], [])})
    assert row["digest"] == digest


def test_sketches_are_decoded_where_there_are_any(tmp_path: Path) -> None:
    values = [float(n) for n in range(61)]
    text = "b64:" + base64.b64encode(struct.pack("<61f", *values)).decode()
    frame = read(
        tmp_path,
        {"Functional.f.0.forward": call([tensor(), tensor(Sketch=text)], [tensor(Sketch=text)])},
    )
    assert frame["sketch"].to_list() == [None, values, values]


def test_a_tensor_file_names_its_row(tmp_path: Path) -> None:
    row = one(
        tmp_path,
        {
            "Functional.f.0.forward": call(
                [tensor(data_name="Functional.f.0.forward.kwargs.x.pt")], []
            )
        },
    )
    assert row["name"] == "Functional.f.0.forward.kwargs.x"
    assert row["data_name"] == "Functional.f.0.forward.kwargs.x.pt"


def test_point_to_point_operations_are_their_tensor(tmp_path: Path) -> None:
    operation = {"class_type": "torch.distributed.P2POp", "op": "isend", "tensor": tensor()}
    row = one(tmp_path, {"Distributed.batch_isend_irecv.0.forward": call([[operation]], [])})
    assert row["dtype"] == "torch.float32" and row["index"] == "0.0"


def test_files_larger_than_one_chunk_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, _ = dumps.random_pair(1, 40)
    whole = read(tmp_path, benchmark)
    monkeypatch.setattr(dumpjson, "_CHUNK", 7)
    assert read(tmp_path, benchmark).equals(whole)


def test_a_string_that_looks_like_a_number_stays_a_string(tmp_path: Path) -> None:
    """The tokens are replaced in bare positions only; inside a string they are text."""
    text = "x, NaN, -Infinity ]"
    row = one(
        tmp_path,
        {"Functional.f.0.forward": call([scalar(text)], [tensor((math.nan,) * 4)])},
    )
    assert row["value"] == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('{"data": {"Functional.f.0.forward": {"input_a', "not a complete dump file"),
        ("[]", "not an msprobe dump file"),
        ('{"data": [1]}', "not an msprobe dump file"),
        ('{"data": {"F.f.0.forward": 3}}', "an object was expected"),
        ('{"data": {"F.f.0.forward": {"input_args": [5]}}}', "found 5"),
        ('{"data": {"F.f.0.forward": {"input_args": ' + "[" * 5000 + "]" * 5000 + "}}}", ""),
        (
            '{"data": {"F.f.0.forward": {"input_args": [{"type": "torch.Tensor", "Max": "big"}]}}}',
            "not a number",
        ),
        (
            '{"data": {"F.f.0.forward": {"input_args": '
            '[{"type": "torch.Tensor", "shape": [-1], "dtype": "torch.float32"}]}}}',
            "shape",
        ),
        (
            '{"data": {"F.f.0.forward": {"input_args": [{"type": "t", "shape": '
            + str([1] * 65)
            + "}]}}}",
            "shape",
        ),
        (
            '{"data": {"F.f.0.forward": {"input_args": [{"type": "t", "Sketch": "b64:AAA"}]}}}',
            "",
        ),
        ('{"data": {"' + "x" * 5000 + '": {}}}', "name has 5000 characters"),
    ],
    ids=range(12),
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "dump.json"
    path.write_text(text)
    with pytest.raises(DumpError, match=said) as error:
        dumpjson.read(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=r"none\.json cannot be read"):
        dumpjson.read(tmp_path / "none.json")


def test_a_file_beyond_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumpjson, "MAX_BYTES", 10)
    with pytest.raises(DumpError, match="at most 10"):
        read(tmp_path, {})
