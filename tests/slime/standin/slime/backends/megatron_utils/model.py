"""The model, its optimizer, and the two ways of running it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.utils import logging_utils

from .data import get_batch
from .loss import loss_function

KEYS = [
    "tokens",
    "total_lengths",
    "response_lengths",
    "loss_masks",
    "log_probs",
    "ref_log_probs",
    "advantages",
    "returns",
]


def build(args, role):
    """A wrapped model and its optimizer, with the checkpoint's weights."""
    sizes = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=sizes["num_key_value_heads"],
        ffn_hidden_size=sizes["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=sizes["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=sizes["vocab_size"],
        max_sequence_length=sizes["max_position_embeddings"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    if role == "critic":
        model.output_layer = ValueHead(sizes["hidden_size"])
    load(model, sizes["seed"])
    if args.bf16:
        model = model.bfloat16()
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=args.lr, bf16=args.bf16, params_dtype=dtype, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return [wrapped], optimizer


def load(model, seed):
    """The same bytes on every machine, under any kernels.

    torch's own initialisation takes sines and logarithms, which kernels round differently. These
    weights are whole numbers drawn from a generator that is the same everywhere, times one power of
    two: a matrix is spread evenly over +-1/32, and a norm's weight is one. A tensor-parallel rank
    has its part of the same whole.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        marked = getattr(parameter, "tensor_model_parallel", False)
        cut = parameter.partition_dim if marked else None
        if cut is not None:
            shape[cut] *= mpu.get_tensor_model_parallel_world_size()
        whole = draw.integers(-1024, 1025, size=tuple(shape))
        values = torch.from_numpy(whole).float() / 2**15
        if cut is not None:
            # gate and up projection are each divided
            halves = values.chunk(2 if "linear_fc1" in name else 1, cut)
            values = torch.cat([_own(half, cut) for half in halves], cut)
        with torch.no_grad():
            parameter.copy_(values if parameter.dim() > 1 else torch.ones_like(values))


def _own(values, cut):
    size = mpu.get_tensor_model_parallel_world_size()
    return values.chunk(size, cut)[mpu.get_tensor_model_parallel_rank()]


class ValueHead(torch.nn.Linear):
    """A critic's last layer."""

    def __init__(self, hidden_size):
        super().__init__(hidden_size, 1, bias=False)
        self.sequence_parallel = False

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        return super().forward(hidden.to(self.weight.dtype)), None


def _forward(model, batch):
    ids = batch["input_ids"]
    size = ids.shape[1]
    mask = torch.triu(torch.ones(size, size, dtype=torch.bool), diagonal=1)[None, None]
    return model(input_ids=ids, position_ids=None, attention_mask=mask, labels=None)


@torch.no_grad()
def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix=""):
    """A forward pass over every micro-batch; ``f`` makes log-probs or values of the logits."""
    for iterator in data_iterator:
        iterator.reset()

    def step(iterator, chunk):
        batch = get_batch(iterator, KEYS)
        return _forward(chunk, batch), lambda out, non_loss_data=True: f(
            out, args=args, batch=batch
        )

    for chunk in model:
        chunk.eval()
    results = []
    for count in num_microbatches:
        results += get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    for chunk in model:
        chunk.train()
    return {
        f"{store_prefix}{key}": [row for result in results for row in result[key]]
        for key in results[0]
    }


def train(
    rollout_id,
    model,
    optimizer,
    opt_param_scheduler,
    data_iterator,
    num_microbatches,
    global_batch_sizes=None,
):
    """One optimizer step per entry of ``num_microbatches``."""
    from .actor import current

    args = current().args
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.train()

    def step(iterator, chunk, count):
        batch = get_batch(iterator, KEYS)
        return _forward(chunk, batch), partial(loss_function, args, batch, count)

    for number, count in enumerate(num_microbatches):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=partial(step, count=count),
            data_iterator=data_iterator,
            model=model,
            num_microbatches=count,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        _, grad_norm, _ = optimizer.step()
        loss = sum(entry["values"][1].item() for entry in losses) / len(losses)
        role = "" if current().role == "actor" else "critic-"
        values = {f"train/{role}loss": loss, f"train/{role}grad_norm": float(grad_norm or 0.0)}
        values["train/step"] = rollout_id * len(num_microbatches) + number
        logging_utils.log(args, values, step_key="train/step")
