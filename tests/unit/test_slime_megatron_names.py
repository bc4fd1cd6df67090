"""Do Megatron's modules get names that every rank and every framework agrees on?"""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from rlprobe.capture import megatron_layout, parameters, provenance
from rlprobe.capture.light.sketches import sketch
from rlprobe.capture.megatron_names import MegatronNames, Shard, is_megatron, shard
from rlprobe.capture.names import named_modules
from rlprobe.store.manifest import Process


def _megatron_class(name: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {"__module__": "megatron.core.stand_in"})


GPTModel = _megatron_class("GPTModel")
TransformerBlock = _megatron_class("TransformerBlock")
TransformerLayer = _megatron_class("TransformerLayer")
MoELayer = _megatron_class("MoELayer")


def _experts(indices: list[int]) -> nn.Module:
    moe = MoELayer()
    moe.router = nn.Linear(2, 4)
    moe.local_expert_indices = indices
    moe.experts = _megatron_class("SequentialMLP")()
    experts = []
    for _ in indices:
        mlp = nn.Module()
        mlp.linear_fc1, mlp.linear_fc2 = nn.Linear(2, 2), nn.Linear(2, 2)
        experts.append(mlp)
    moe.experts.local_experts = nn.ModuleList(experts)
    return moe


def chunk(
    layers: list[int], *, experts: list[int] | None = None, values: bool = False
) -> nn.Module:
    """A model chunk that holds these global layers (counted from 0)."""
    model = GPTModel()
    model.decoder = TransformerBlock()
    built = []
    for number in layers:
        layer = TransformerLayer()
        layer.layer_number = number + 1
        layer.self_attention = nn.Module()
        layer.self_attention.linear_qkv = nn.Linear(2, 2)
        layer.mlp = nn.Linear(2, 2) if experts is None else _experts(experts)
        built.append(layer)
    model.decoder.layers = nn.ModuleList(built)
    model.output_layer = nn.Linear(2, 1 if values else 8, bias=False)
    return model


def test_a_layer_carries_its_global_number_on_every_pipeline_stage() -> None:
    """Stage 1 of a virtual pipeline holds layers 2 and 6 of eight, both called 0 locally."""
    names = MegatronNames([chunk([2, 3]), chunk([6, 7])])
    assert names.module(0, "decoder.layers.0.mlp") == "model.layers.2.mlp"
    assert names.module(1, "decoder.layers.0.mlp") == "model.layers.6.mlp"
    assert names.module(1, "decoder.layers.1") == "model.layers.7"


def test_an_expert_carries_its_global_index() -> None:
    names = MegatronNames([chunk([0], experts=[4, 5])])
    path = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2"
    assert names.module(0, path) == "model.layers.0.mlp.experts.5.down_proj"
    assert names.parameter(0, f"{path}.weight") == "model.layers.0.mlp.experts.5.down_proj.weight"


def test_grouped_experts_have_one_parameter_per_expert() -> None:
    names = MegatronNames([chunk([0], experts=[4, 5])])
    grouped = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    assert names.parameter(0, grouped) == "model.layers.0.mlp.experts.5.gate_up_proj.weight"


@pytest.mark.parametrize(
    ("megatron", "hugging_face"),
    [
        ("embedding.word_embeddings", "model.embed_tokens"),
        ("decoder.final_layernorm", "model.norm"),
        ("output_layer", "lm_head"),
        ("decoder.layers.0", "model.layers.0"),
        ("decoder.layers.0.input_layernorm", "model.layers.0.input_layernorm"),
        ("decoder.layers.0.pre_mlp_layernorm", "model.layers.0.post_attention_layernorm"),
        ("decoder.layers.0.self_attention", "model.layers.0.self_attn"),
        ("decoder.layers.0.self_attention.linear_proj", "model.layers.0.self_attn.o_proj"),
        ("decoder.layers.0.self_attention.q_layernorm", "model.layers.0.self_attn.q_norm"),
        ("decoder.layers.0.mlp.linear_fc2", "model.layers.0.mlp.down_proj"),
        ("decoder.layers.0.mlp.router", "model.layers.0.mlp.gate"),
        ("language_model.decoder.layers.0.mlp", "model.language_model.layers.0.mlp"),
        ("vision_model.blocks.0", "vision_model.blocks.0"),
    ],
)
def test_modules_that_mean_the_same_have_the_same_name(megatron: str, hugging_face: str) -> None:
    assert MegatronNames([chunk([0])]).module(0, megatron) == hugging_face


def test_a_norm_fused_into_a_projection_keeps_the_norms_name() -> None:
    names = MegatronNames([chunk([3])])
    fused = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert names.parameter(0, fused) == "model.layers.3.input_layernorm.weight"
    fused = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert names.parameter(0, fused) == "model.layers.3.post_attention_layernorm.weight"


def test_a_critics_last_layer_is_no_language_head() -> None:
    assert MegatronNames([chunk([0], values=True)]).module(0, "output_layer") == "score"


def test_names_within_a_model_stay_distinct() -> None:
    chunks = [chunk([0, 1], experts=[2, 3]), chunk([4, 5], experts=[2, 3])]
    names = MegatronNames(chunks)
    paths = [
        (index, path) for index, model in enumerate(chunks) for path, _ in model.named_parameters()
    ]
    translated = [names.parameter(index, path) for index, path in paths]
    heads = {name for name in translated if name.startswith("lm_head")}
    assert len(set(translated)) == len(translated) - len(heads)


def test_other_models_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not is_megatron(model)
    assert MegatronNames.of([model]) is None
    assert MegatronNames.of([]) is None


def test_captured_records_and_parameters_carry_these_names() -> None:
    chunks = [chunk([2]), chunk([6], experts=[2, 3])]
    records = [record for record, _, _ in named_modules(chunks)]
    assert "Module.model.layers.2.mlp.Linear" in records
    assert "Module.model.layers.6.mlp.experts.3.Module" in records
    names = {item.name for item in parameters.held(chunks)}
    assert "model.layers.2.self_attn.qkv_proj.weight" in names
    assert "model.layers.6.mlp.experts.3.down_proj.weight" in names


def test_a_tensor_parallel_rank_says_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    mpu = types.SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 4, get_tensor_model_parallel_rank=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", mpu)
    parameter = nn.Parameter(torch.zeros(6, 5))
    assert shard("model.norm.weight", parameter, gated=True) is None
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = 0, 1
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    assert shard(fused, parameter, gated=True) == Shard((24, 5), (0, 12))
    # the gate's rows come before all of the up projection's: this rank has some of either
    first = "model.layers.0.mlp.gate_up_proj.weight"
    assert shard(first, parameter, gated=True) == Shard((24, 5), None, ((6, 3), (18, 3)))
    assert shard(first, parameter, gated=False) == Shard((24, 5), (0, 12))
    parameter.partition_stride = 2
    assert shard(fused, parameter, gated=True) == Shard((24, 5), None)


@pytest.mark.parametrize(
    ("sizes", "shape", "cut"),
    [
        ({"output_size": 24, "input_size": 5}, (24, 5), (0, 12)),
        ({"input_size": 20, "output_size": 6}, (6, 20), (1, 10)),
        ({"num_embeddings": 24}, (24, 5), (0, 12)),
        ({"output_size": 6, "input_size": 5}, (6, 5), None),
    ],
)
def test_what_a_weight_that_nobody_initialised_is_a_part_of_is_said_by_its_layer(
    monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int],
    shape: tuple[int, ...],
    cut: tuple[int, int] | None,
) -> None:
    """With --no-initialization Megatron marks no weight, or marks all as whole."""
    mpu = types.SimpleNamespace(
        get_tensor_model_parallel_world_size=lambda: 4, get_tensor_model_parallel_rank=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", mpu)
    model = chunk([2])
    layer = nn.Module()
    model.decoder.layers[0].self_attention.linear_proj = layer
    layer.weight = nn.Parameter(torch.zeros(6, 5))
    layer.weight.tensor_model_parallel, layer.weight.partition_dim = False, -1
    for name, whole in sizes.items():
        own = 5 if name == "input_size" else 6
        setattr(layer, name, whole)
        setattr(layer, f"{name}_per_partition", own)
    name = "model.layers.2.self_attn.o_proj.weight"
    (held,) = [item for item in parameters.held([model]) if item.name == name]
    assert (held.shape, held.cut, held.complete) == (shape, cut, cut is None)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sketches_of_gated_shards_add_up_to_the_whole(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    torch.manual_seed(0)
    whole = torch.randn(24, 5)
    gates, ups = (half.chunk(ranks) for half in whole.chunk(2))
    total = torch.zeros(61)
    for rank in range(ranks):
        mpu = types.SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: ranks,
            get_tensor_model_parallel_rank=lambda rank=rank: rank,
        )
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", mpu)
        parameter = nn.Parameter(torch.cat([gates[rank], ups[rank]]))
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = 0, 1
        name = "model.layers.0.mlp.gate_up_proj.weight"
        held = parameters._tensor_parallel(name, parameter, gated=True)
        assert held.shape == (24, 5) and not held.complete
        total += held.sketch_of(held.local)
    assert torch.allclose(total, sketch(whole), atol=1e-4)


@pytest.fixture
def last_of_two_stages():
    """megatron-core as it sees itself on rank 1 of a pipeline of two, two virtual stages each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = pytest.importorskip("megatron.core.parallel_state")
        importlib.import_module("megatron.core.models.gpt")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=1, world_size=2)
    state.initialize_model_parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        create_gloo_process_groups=False,
    )
    yield
    state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.cell("back end", "Megatron: names and layout with megatron-core on CPU", "run")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_real_megatron_chunks_carry_their_global_layers(last_of_two_stages: None) -> None:
    """megatron-core itself decides which layers a chunk holds; the names must follow it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=8,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=16,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        add_bias_linear=False,
        num_moe_experts=2,
        moe_token_dispatcher_type="allgather",
    )
    chunks = []
    for virtual in range(2):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=virtual)
        chunks.append(
            GPTModel(
                config,
                spec,
                vocab_size=8,
                max_sequence_length=8,
                pre_process=False,
                post_process=virtual == 1,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=virtual,
            )
        )
    names = MegatronNames.of(chunks)
    assert names is not None
    held = {
        names.module(index, path)
        for index, model in enumerate(chunks)
        for path, _ in model.named_modules()
    }
    layers = {int(name.split(".")[2]) for name in held if name.startswith("model.layers.")}
    assert layers == {2, 3, 6, 7}
    assert "model.layers.7.mlp.experts.1.down_proj" in held
    assert {"model.norm", "lm_head"} <= held
    found = megatron_layout.layout(chunks)
    assert {name: found[name] for name in ("tp", "pp", "dp", "cp", "ep")} == {
        "tp": 1, "pp": 2, "dp": 1, "cp": 1, "ep": 1,
    }  # fmt: skip
    assert (found["pp_rank"], found["chunks"], found["sequence_parallel"]) == (1, 2, False)
    # a run's manifest takes all of it
    described = Process.model_validate(provenance.layout("actor", 1, 2, found)).model_dump()
    assert found.items() <= described.items()
    chunks[0].config.sequence_parallel = True
    assert megatron_layout.layout(chunks)["sequence_parallel"] is True


def test_without_megatron_there_is_no_layout() -> None:
    assert megatron_layout.layout([chunk([0])]) == {}
