"""One rank of an update of a small Megatron model with experts, on the CPU over gloo.

``python capture_experts_run.py DISPATCHER RANK WORLD DIRECTORY``: the samples are divided over the
ranks, and the experts too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from capture_helpers import UPDATE, session
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import rlprobe.frameworks.verl.cpu.megatron  # noqa: F401  before Megatron: it looks for CUDA
from rlprobe.capture.megatron_names import MegatronNames
from rlprobe.capture.recorder import Recorder

EXPERTS = 4
ROW = 40
#: More samples than ranks, of other lengths, so that ranks send each other other numbers of rows.
SAMPLES = [np.random.default_rng(length).integers(1, 40, length) for length in (5, 9, 7, 4, 11, 3)]


def main(dispatcher: str, rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "meeting"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mpu.initialize_model_parallel(expert_model_parallel_size=world)
    model_parallel_cuda_manual_seed(0)
    model = _model(dispatcher)
    _fill(model)
    recorder = Recorder(
        session(directory, coordinate_sketch=True), role="actor", rank=rank, world_size=world
    )
    own = SAMPLES[rank::world]
    with recorder.stage(UPDATE, 0, 1, model) as scope:
        for number, samples in enumerate((own[: len(own) // 2], own[len(own) // 2 :])):
            scope.micro_step(number)
            scope.tokens([np.asarray(sample, np.int64) for sample in samples])
            _update(model, samples)
    dist.barrier()
    dist.destroy_process_group()


def _model(dispatcher: str) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        moe_ffn_hidden_size=24,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        normalization="RMSNorm",
    )
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    return GPTModel(config, spec, vocab_size=40, max_sequence_length=64,
                    position_embedding_type="rope")  # fmt: skip


def _fill(model: GPTModel) -> None:
    """The same weights in every layout: drawn by their names, of which experts' are global."""
    names = MegatronNames([model])
    for path, parameter in model.named_parameters():
        if parameter.dim() == 2:
            seed = sum(names.parameter(0, path).encode())
            drawn = np.random.default_rng(seed).standard_normal(tuple(parameter.shape))
            parameter.data.copy_(torch.from_numpy(drawn * 0.3))


def _update(model: GPTModel, samples: list[np.ndarray]) -> None:
    # each sample stands before padding that belongs to nobody; ranks' rows are of one length, which
    # one kind of dispatcher needs
    bounds = np.cumsum([0, *(len(sample) + 2 for sample in samples)])
    bounds[-1] = ROW
    ids = np.zeros(bounds[-1], np.int64)
    used = np.zeros(bounds[-1], np.float32)
    positions = np.zeros(bounds[-1], np.int64)
    for start, sample in zip(bounds, samples, strict=False):
        where = slice(start, start + len(sample))
        ids[where], used[where], positions[where] = sample, 1, np.arange(len(sample))
    limits = torch.tensor(bounds, dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=limits, cu_seqlens_kv=limits,
        cu_seqlens_q_padded=limits, cu_seqlens_kv_padded=limits,
        max_seqlen_q=ROW + 1, max_seqlen_kv=ROW + 1,
    )  # fmt: skip
    logits = model(
        torch.from_numpy(ids)[None], torch.from_numpy(positions)[None], None,
        packed_seq_params=packed,
    )  # fmt: skip
    (logits.float().square().sum(-1) * torch.from_numpy(used)).sum().backward()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
