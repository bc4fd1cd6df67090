"""Are differently named records of the same thing found, and is every rule used said?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rlprobe.compare.match import rules
from rlprobe.errors import ConfigError
from tests.msprobe.dumps import call, tensor
from tests.unit.compare_helpers import compared, compared_data
from tests.unit.named_modules import assert_all_equal, leaf, modules


@pytest.mark.parametrize(
    "prefix",
    [
        "module.",
        "_fsdp_wrapped_module.",
        "module.module.",
        "_orig_mod.",
        "base_model.model.",
        "0.",
        "0.module.module.",
    ],
)
def test_a_wrapped_model_is_the_same_model(tmp_path: Path, prefix: str) -> None:
    names = ("model.layers.0.mlp.Linear", "model.layers.1.mlp.Linear", "Qwen2ForCausalLM")
    wrapped = modules(*names[:2], prefix=prefix) | {
        f"Module.{prefix}{names[2]}.forward.0": call([leaf(3.0)], [leaf(3.5)])
    }
    result = compared_data(tmp_path, modules(*names), wrapped)
    assert_all_equal(result, wrappers=6)


def test_wrappers_inside_the_model_do_not_matter(tmp_path: Path) -> None:
    plain = modules("model.layers.0.self_attn.q_proj.Linear")
    wrapped = modules(
        "model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj"
        ".base_layer.Linear"
    )
    assert_all_equal(compared_data(tmp_path, plain, wrapped), wrappers=2)


def test_fsdp2_renames_classes(tmp_path: Path) -> None:
    plain = modules("model.layers.0.Qwen2DecoderLayer")
    wrapped = modules("model.layers.0.FSDPQwen2DecoderLayer")
    assert_all_equal(compared_data(tmp_path, plain, wrapped), wrappers=2)


def test_another_class_at_the_same_place_is_the_same_module(tmp_path: Path) -> None:
    plain = modules("model.norm.Qwen2RMSNorm", "model.layers.0.mlp.Linear")
    device = modules("model.norm.NpuRMSNorm", "model.layers.0.mlp.Linear")
    assert_all_equal(compared_data(tmp_path, plain, device), **{"class": 2})


def test_megatron_names_meet_hugging_face_ones(tmp_path: Path) -> None:
    plain = modules(
        "model.embed_tokens.Embedding",
        "model.layers.3.self_attn.o_proj.Linear",
        "model.layers.3.mlp.down_proj.Linear",
        "model.norm.Qwen2RMSNorm",
        "lm_head.Linear",
    )
    megatron = modules(
        "embedding.word_embeddings.VocabParallelEmbedding",
        "decoder.layers.3.self_attention.linear_proj.RowParallelLinear",
        "decoder.layers.3.mlp.linear_fc2.RowParallelLinear",
        "decoder.final_layernorm.RMSNorm",
        "output_layer.ColumnParallelLinear",
        prefix="0.module.module.",
    )
    result = compared_data(tmp_path, plain, megatron)
    assert_all_equal(result, **{"class": 10})


def test_model_chunks_number_their_layers_on(tmp_path: Path) -> None:
    plain = modules(*(f"model.layers.{n}.mlp.MLP" for n in range(4)))
    chunked = modules(
        "0.module.decoder.layers.0.mlp.MLP",
        "0.module.decoder.layers.1.mlp.MLP",
        "1.module.decoder.layers.0.mlp.MLP",
        "1.module.decoder.layers.1.mlp.MLP",
    )
    assert_all_equal(compared_data(tmp_path, plain, chunked), megatron_chunks=8)


def test_the_same_chunks_on_both_sides_need_no_rule(tmp_path: Path) -> None:
    chunked = modules("0.decoder.layers.0.mlp.MLP", "1.decoder.layers.0.mlp.MLP")
    assert_all_equal(compared_data(tmp_path, chunked, chunked))


PARTS = ("q_proj", "k_proj", "v_proj")
WIDTHS = (8, 4, 4)


def _attention(fused: bool) -> dict[str, Any]:
    path = "model.layers.0.self_attn"
    inputs = [leaf(7.0, (4, 8))]
    outputs = [tensor((n + 1.0, -n, 0.5, 2.0 + n), (4, w)) for n, w in enumerate(WIDTHS)]
    weights = [tensor((n + 0.5, -1.0, 0.25, 3.0 + n), (w, 8)) for n, w in enumerate(WIDTHS)]
    if not fused:
        return {
            f"Module.{path}.{name}.Linear.forward.0": call(
                inputs, [outputs[n]], parameters={"weight": weights[n]}
            )
            for n, name in enumerate(PARTS)
        }
    whole = tensor((3.0, -2.0, 0.5, math.sqrt(4 + 9 + 16)), (4, 16))
    weight = tensor((2.5, -1.0, 0.25, math.sqrt(9 + 16 + 25)), (16, 8))
    entry = call(inputs, [whole], parameters={"weight": weight})
    return {f"Module.{path}.qkv_proj.QKVParallelLinear.forward.0": entry}


@pytest.mark.parametrize("fused_side", ["benchmark", "target"])
def test_a_fused_projection_is_compared_with_its_parts(tmp_path: Path, fused_side: str) -> None:
    sides = [_attention(fused_side == "benchmark"), _attention(fused_side == "target")]
    result = compared_data(tmp_path, *sides)
    assert result.records.height == 3
    assert result.summary["counts"]["matched"] == 3
    assert result.summary["rules"] == {"qkv": 3}
    assert result.records["error"].max() == pytest.approx(0, abs=1e-15)
    parts = result.records[
        "name_target" if fused_side == "benchmark" else "name_benchmark"
    ].to_list()
    assert all(name.count("; ") == 2 for name in parts)
    widths = result.records.filter(slot="output")["shape_target"].to_list()
    assert widths == [[4, 16]]


def test_an_error_in_one_part_of_a_fused_projection_is_seen(tmp_path: Path) -> None:
    parts = _attention(False)
    parts["Module.model.layers.0.self_attn.k_proj.Linear.forward.0"]["output"][0]["Norm"] *= 1.5
    result = compared_data(tmp_path, parts, _attention(True))
    assert result.records.filter(slot="output")["error"][0] > 0.05
    assert result.records.filter(slot="parameters")["error"][0] == pytest.approx(0, abs=1e-15)


def test_parts_without_their_whole_stay_what_they_are(tmp_path: Path) -> None:
    parts = _attention(False)
    del parts["Module.model.layers.0.self_attn.v_proj.Linear.forward.0"]
    result = compared_data(tmp_path, parts, _attention(True))
    assert result.summary["counts"]["matched"] == 0
    assert result.summary["counts"]["benchmark_only"] == 6


def test_fused_tensors_are_compared_element_by_element(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tests.msprobe import tensors

    g = torch.Generator().manual_seed(1)
    gate, up = torch.randn(3, 5, generator=g), torch.randn(3, 5, generator=g)
    x = torch.randn(3, 2, generator=g)
    path = "model.layers.0.mlp"
    tensors.write(
        tmp_path / "b",
        {
            f"Module.{path}.gate_proj.Linear.forward.0": ([x], [gate]),
            f"Module.{path}.up_proj.Linear.forward.0": ([x], [up]),
        },
    )
    for name, whole in (("t", torch.cat([gate, up], -1)), ("swapped", torch.cat([up, gate], -1))):
        tensors.write(
            tmp_path / name,
            {f"Module.{path}.gate_up_proj.MergedColumnParallelLinear.forward.0": ([x], [whole])},
        )
    same = compared(tmp_path / "b", tmp_path / "t", tmp_path / "same")
    assert same.summary["rules"] == {"gate_up": 2}
    assert same.records["error_kind"].to_list() == ["tensor", "tensor"]
    assert same.records["error"].to_list() == [0.0, 0.0]
    other = compared(tmp_path / "b", tmp_path / "swapped", tmp_path / "other")
    assert other.records.filter(slot="output")["error"][0] > 0.5


def _functions(*ops: str) -> dict[str, Any]:
    """Calls numbered as msprobe numbers them; a name of a module stands for its record."""
    data: dict[str, Any] = {}
    numbers: dict[str, int] = {}
    for position, op in enumerate(ops):
        op, _, value = op.partition("=")
        top = float(value or 1)
        if op.startswith("Module."):
            data[op] = call([leaf(top)], [leaf(top)])
        else:
            number = numbers.get(op, 0)
            numbers[op] = number + 1
            data[f"{op}.{number}.forward"] = call([leaf(top)], [leaf(top)])
        assert position < 1000
    return data


def test_one_more_call_on_one_side_does_not_shift_the_others(tmp_path: Path) -> None:
    """slime's first stage made 8 more records: all counters behind them moved."""
    layer = "Module.model.layers.{}.mlp.MLP.forward.0"
    shared = ["Functional.linear=2", layer.format(0), "Functional.linear=3", layer.format(1)]
    benchmark = _functions("Functional.linear=9", "Module.model.rotary.Rotary.forward.0", *shared)
    target = _functions("Module.model.rotary.Rotary.forward.0", *shared)
    result = compared_data(tmp_path, benchmark, target, coverage=0.5)
    assert result.summary["rules"] == {"call_counter": 4}
    assert result.summary["counts"]["benchmark_only"] == 2
    assert result.status("Functional.linear.0.forward.input.0") == "benchmark_only"
    assert result.records["error"].max() == 0


def test_a_call_without_a_backward_shifts_no_backward_call(tmp_path: Path) -> None:
    def step(first: int) -> dict[str, Any]:
        """Two linears and what they send back, numbered from ``first``."""
        data: dict[str, Any] = {}
        for place, top in enumerate((2.0, 3.0)):
            name = f"Functional.linear.{first + place}"
            data[f"{name}.forward"] = call([leaf(top)], [leaf(top)])
            data[f"Module.model.layers.{place}.mlp.MLP.forward.0"] = call([leaf(1.0)], [leaf(1.0)])
        for place, top in ((1, 30.0), (0, 20.0)):
            module = f"Module.model.layers.{place}.mlp.MLP.backward.0"
            data[f"Functional.linear.{first + place}.backward"] = {
                "input": [leaf(top)], "output": [leaf(top)]}  # fmt: skip
            data[module] = {"input": [leaf(1.0)], "output": [leaf(1.0)]}
        return data

    extra = {"Functional.linear.0.forward": call([leaf(9.0)], [leaf(9.0)])}
    shifted = {**extra, "Module.model.rotary.Rotary.forward.0": call([leaf(1.0)], []), **step(1)}
    plain = {"Module.model.rotary.Rotary.forward.0": call([leaf(1.0)], []), **step(0)}
    result = compared_data(tmp_path, plain, shifted, coverage=0.5)
    assert result.records["error"].max() == 0
    assert result.summary["rules"] == {"call_counter": 8}
    assert result.summary["counts"]["target_only"] == 2


def test_without_modules_shapes_tell_calls_apart(tmp_path: Path) -> None:
    def linear(*tops: tuple[float, int]) -> dict[str, Any]:
        return {
            f"Functional.linear.{n}.forward": call([leaf(top, (w,))], [leaf(top, (w,))])
            for n, (top, w) in enumerate(tops)
        }

    result = compared_data(
        tmp_path, linear((9.0, 3), (1.0, 5), (2.0, 7)), linear((1.0, 5), (2.0, 7)), coverage=0.5
    )
    assert result.summary["rules"] == {"call_counter": 4}
    assert result.records["error"].max() == 0


def _training_step(recomputes: bool, micro_batches: int = 2) -> dict[str, Any]:
    """Forward, then backward of two layers, micro-batch by micro-batch."""
    data: dict[str, Any] = {}
    numbers: dict[str, int] = {}

    def record(path: str, direction: str, top: float) -> None:
        number = numbers.get(path + direction, 0)
        numbers[path + direction] = number + 1
        inner = f"Functional.silu.{numbers.get('silu', 0)}.forward"
        if direction == "forward" and path:
            numbers["silu"] = numbers.get("silu", 0) + 1
            data[inner] = call([leaf(top)], [leaf(top)])
        entry: dict[str, Any] = call([leaf(top)], [leaf(top)])
        if direction == "backward":
            entry = {"input": [leaf(top)], "output": [leaf(top)]}
        name = f"model.layers.{path}.Layer" if path else "Model"
        data[f"Module.{name}.{direction}.{number}"] = entry

    for batch in range(micro_batches):
        for layer in "01":
            record(layer, "forward", 1 + batch + 0.1 * int(layer))
        record("", "forward", 5.0 + batch)
        record("", "backward", 7.0 + batch)
        for layer in "10":
            if recomputes:
                record(layer, "forward", 1 + batch + 0.1 * int(layer))
            record(layer, "backward", 3 + batch + 0.1 * int(layer))
    return data


@pytest.mark.parametrize("recomputing", ["benchmark", "target"])
def test_recomputed_forwards_are_set_aside(tmp_path: Path, recomputing: str) -> None:
    result = compared_data(
        tmp_path,
        _training_step(recomputing == "benchmark"),
        _training_step(recomputing == "target"),
    )
    assert result.lack is None
    assert result.records["error"].max() == 0
    single = result.records.filter(status=f"{recomputing}_only")
    assert single["rule"].unique().to_list() == ["recompute"]
    # two layers, two micro-batches: a module and a function each, with an input and an output
    assert single.height == 16
    assert result.summary["coverage"] == {"benchmark": 1.0, "target": 1.0}


def test_recomputation_on_both_sides_needs_no_rule(tmp_path: Path) -> None:
    result = compared_data(tmp_path, _training_step(True), _training_step(True))
    assert_all_equal(result)


def test_a_devices_own_kernel_meets_its_counterpart(tmp_path: Path) -> None:
    def step(op: str) -> dict[str, Any]:
        return {
            f"{op}.0.forward": call([leaf(1.0), leaf(2.0), leaf(3.0), leaf(9.0)], [leaf(4.0)]),
            "Module.model.layers.0.Layer.forward.0": call([leaf(5.0)], [leaf(5.0)]),
        }

    result = compared_data(
        tmp_path,
        step("Functional.scaled_dot_product_attention"),
        step("NPU.npu_fusion_attention"),
        coverage=0.5,
    )
    assert result.summary["rules"] == {"fused_attention": 4}
    assert result.records["error"].max() == 0
    # the fourth argument means something else on either side
    assert result.summary["counts"]["benchmark_only"] == 1


def test_a_users_own_rule_comes_before_ours(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "format: 1\n"
        "rename:\n"
        "  - {name: blocks, replace: [['^transformer\\.h\\.', 'model.layers.']]}\n"
        "fuse:\n"
        "  - {name: gate_up, whole: w13, parts: [w1, w3]}\n"
    )
    own = rules.load(file)
    assert [fuse.whole for fuse in own.fuses] == ["w13", "qkv_proj"]
    result = compared_data(
        tmp_path,
        modules("model.layers.0.mlp.MLP"),
        modules("transformer.h.0.mlp.MLP"),
        rules=own,
    )
    assert_all_equal(result, blocks=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rename: []", "format: 1 was expected"),
        ("format: 1\nrenames: []", "unknown key 'renames'"),
        ("format: 1\nrename: [{name: a, replace: [['(', 'b']]}]", "no regular expression"),
        ("format: 1\nrename: [{name: a, replace: [['x', '\\\\9']]}]", "names a group"),
        ("format: 1\nfuse: [{name: a, whole: b, parts: [c]}]", "at least two parts"),
        ("format: 1\nfuse: [{whole: b, parts: [c, d]}]", "with a name"),
        ("format: 1\nfuse: [{name: wrappers, whole: b, parts: [c, d]}]", "built in"),
        ("format: 1\nfunctions: [{name: a, names: b, slots: {}}]", "names is a list"),
        ("format: 1\n- x", "not YAML"),
    ],
)
def test_a_wrong_rules_file_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rules.parse(text, "mine.yaml")


def test_a_missing_rules_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        rules.load(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("left", "right"),
    [("actor.", ""), ("", "policy.wrapped."), ("actor.", "policy.wrapped."), ("a.b.c.", "a.c.")],
)
def test_what_all_names_of_a_side_begin_with_does_not_matter(
    tmp_path: Path, left: str, right: str
) -> None:
    names = ["model.embed.Embedding", *(f"model.layers.{n}.mlp.MLP" for n in range(3))]
    result = compared_data(tmp_path, modules(*names, prefix=left), modules(*names, prefix=right))
    assert_all_equal(result, common_prefix=8)


def test_a_second_model_is_not_the_first_under_another_prefix(tmp_path: Path) -> None:
    names = [f"model.layers.{n}.mlp.MLP" for n in range(3)]
    both = {**modules(*names), **modules(*names, prefix="teacher.", start=9.0)}
    result = compared_data(tmp_path, both, modules(*names), coverage=0.4)
    assert result.summary["rules"] == {}
    assert result.summary["counts"]["benchmark_only"] == 6
    assert result.records["error"].max() == 0


def test_layers_that_only_end_alike_are_not_paired(tmp_path: Path) -> None:
    """A tower of another name has layers of the same numbers: nothing says they are the same."""
    left = modules(*(f"vision.blocks.{n}.fc.Linear" for n in range(2)), "model.norm.Norm")
    right = modules(*(f"audio.tower.{n}.proj.Linear" for n in range(2)), "model.norm.Norm")
    result = compared_data(tmp_path, left, right, coverage=0.1)
    assert result.summary["counts"]["benchmark_only"] == 4
    assert result.summary["rules"] == {}


@pytest.mark.parametrize("path", ["layers.0.module.mlp", "actor.module.layers.0.mlp"])
def test_a_wrapper_around_a_part_of_the_model_hides_nothing(tmp_path: Path, path: str) -> None:
    plain = path.replace(".module.", ".")
    sides = [
        {f"Module.{name}.Linear.forward.0": call([tensor()], [tensor()]) for name in names}
        for names in ((plain, "head"), (path, "head"))
    ]
    result = compared_data(tmp_path, *sides)
    assert result.summary["counts"]["matched"] == 4 and result.lack is None


def test_a_module_called_module_is_still_itself(tmp_path: Path) -> None:
    """Both names on one side: each meets its own, and the other stays alone."""
    names = ("a.b", "a.module.b")
    sides = [
        {f"Module.{name}.Linear.forward.0": call([], [tensor()]) for name in some}
        for some in (names, names[:1])
    ]
    result = compared_data(tmp_path, *sides, coverage=0.4)
    assert result.summary["unmatched"]["benchmark"] == [
        "Module.a.module.b.Linear.forward.0.output.0"
    ]
    assert result.row("Module.a.b.Linear.forward.0.output.0")["status"] == "matched"


def test_moving_to_the_device_is_one_call_on_either(tmp_path: Path) -> None:
    sides = [
        {
            f"Tensor.{name}.{n}.forward": call([tensor((n + 1.0, 0.0, 0.5, 2.0))], [tensor()])
            for n in range(3)
        }
        for name in ("cuda", "npu")
    ]
    result = compared_data(tmp_path, *sides)
    assert result.summary["rules"] == {"to_device": 6} and result.lack is None
    assert result.records["error"].max() == 0
