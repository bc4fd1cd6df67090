"""The policy's log-probs and an engine's prefill over the same prompts, each dumped by its hooks.

    python prefill.py train DIRECTORY | python prefill.py engine DIRECTORY

``train`` is the stand-in's actor, in one process and without Ray. ``engine`` is a model with
SGLang's module tree and layout (tokens of a request end to end, fused projections, the residual
stream beside each block's own output) behind a ``ModelRunner``, with the weights ``train`` left. It
runs the prompts twice, the second time with one weight another.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PROMPTS = [[5, 6, 7, 9, 30], [8, 9, 12], [5, 6, 7, 9, 30], [11, 12, 13, 14]]
WEIGHTS = "weights.pt"
HEADS, GROUPS, SIZE, BASE, EPS = 4, 2, 8, 10000.0, 1e-5


def train(directory: Path) -> None:
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor, free_port
    from slime.utils.arguments import parse_args

    actor = MegatronTrainRayActor(1, 0, free_port())
    actor.init(parse_args(), "actor")
    weights = {name: p.detach().clone() for name, p in actor.model[0].module.named_parameters()}
    torch.save(weights, directory / WEIGHTS)
    lengths = [len(prompt) - 1 for prompt in PROMPTS]
    actor.train_actor(
        0,
        {
            "tokens": [torch.tensor(prompt) for prompt in PROMPTS],
            "response_lengths": lengths,
            "total_lengths": [len(prompt) for prompt in PROMPTS],
            "loss_masks": [torch.ones(n) for n in lengths],
            "rewards": [1.0, -1.0, 0.5, -0.5],
            "rollout_log_probs": [torch.zeros(n) for n in lengths],
        },
    )


class RMSNorm(nn.Module):
    """As SGLang's: with a residual it adds it first, and gives the sum too."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normed = functional.rms_norm(total, total.shape[-1:], self.weight, EPS)
        return normed if residual is None else (normed, total)


class Linear(nn.Module):
    """Returns its output and the bias it did not add."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return functional.linear(x, self.weight), None


class QKVParallelLinear(Linear):
    pass


class MergedColumnParallelLinear(Linear):
    pass


class RowParallelLinear(Linear):
    pass


class RotaryEmbedding(nn.Module):
    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = 1.0 / BASE ** (torch.arange(0, SIZE, 2) / SIZE)
        angles = torch.cat([positions[:, None] * frequencies] * 2, -1)[:, None]
        return self._turned(query, angles), self._turned(key, angles)

    @staticmethod
    def _turned(x: Tensor, angles: Tensor) -> Tensor:
        heads = x.reshape(len(x), -1, SIZE)
        one, other = heads.chunk(2, -1)
        turned = heads * angles.cos() + torch.cat([-other, one], -1) * angles.sin()
        return turned.reshape(x.shape)


class Attention(nn.Module):
    def __init__(self, qkv: Tensor, out: Tensor) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = QKVParallelLinear(qkv), RowParallelLinear(out)
        self.rotary_emb = RotaryEmbedding()

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        sizes = [HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE]
        query, key, value = self.qkv_proj(hidden_states)[0].split(sizes, -1)
        query, key = self.rotary_emb(positions, query, key)
        heads = [
            x.reshape(len(x), -1, SIZE).repeat_interleave(HEADS * SIZE // x.shape[-1], 1)
            for x in (query, key, value)
        ]
        q, k, v = (x.transpose(0, 1) for x in heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(0, 1).reshape(len(query), -1))[0]


class MLP(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(gate_up)
        self.down_proj = RowParallelLinear(down)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)[0]


class DecoderLayer(nn.Module):
    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        super().__init__()
        qkv = _by_kind(weights[f"{prefix}self_attention.linear_qkv.weight"])
        self.self_attn = Attention(qkv, weights[f"{prefix}self_attention.linear_proj.weight"])
        self.mlp = MLP(
            weights[f"{prefix}mlp.linear_fc1.weight"], weights[f"{prefix}mlp.linear_fc2.weight"]
        )
        self.input_layernorm = RMSNorm(weights[f"{prefix}input_layernorm.weight"])
        self.post_attention_layernorm = RMSNorm(weights[f"{prefix}pre_mlp_layernorm.weight"])

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen2Model(nn.Module):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        table = weights["embedding.word_embeddings.weight"]
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        count = len({name.split(".")[2] for name in weights if ".layers." in name})
        self.layers = nn.ModuleList(
            DecoderLayer(weights, f"decoder.layers.{n}.") for n in range(count)
        )
        self.norm = RMSNorm(weights["decoder.final_layernorm.weight"])

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)[0]


class Qwen2ForCausalLM(nn.Module):
    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.model = Qwen2Model(weights)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.model(input_ids, positions)


def _by_kind(weight: Tensor) -> Tensor:
    """Megatron's rows, group by group, as all queries, then all keys, then all values."""
    each = HEADS // GROUPS
    groups = weight.reshape(GROUPS, each + 2, SIZE, -1)
    kinds = (groups[:, :each], groups[:, each : each + 1], groups[:, each + 1 :])
    return torch.cat([kind.reshape(-1, weight.shape[1]) for kind in kinds])


class ModelRunner:
    """SGLang's, as far as a dump goes."""

    def __init__(self, server_args: Any, weights: dict[str, Tensor]) -> None:
        self.server_args = server_args
        self.model = Qwen2ForCausalLM(weights)

    def forward(self, forward_batch: Any) -> Tensor:
        found: Tensor = self.model(forward_batch.input_ids, forward_batch.positions)
        return found


def engine(directory: Path) -> None:
    from rlprobe.frameworks.slime import sglang

    module = types.ModuleType("sglang.srt.model_executor.model_runner")
    module.ModelRunner = ModelRunner  # type: ignore[attr-defined]
    sglang.patch(module)
    weights = torch.load(directory / WEIGHTS, weights_only=True)
    server_args = types.SimpleNamespace(disable_cuda_graph=False, skip_server_warmup=True)
    runner = module.ModelRunner(server_args, weights)
    with torch.no_grad():
        # a health check's one token, then each prompt of its own: one prefill a prompt
        _prefill(runner, [[1], *PROMPTS])
        runner.model.model.layers[1].mlp.down_proj.weight *= 1.01
        _prefill(runner, [[1], *PROMPTS])


def _prefill(runner: Any, requests: list[list[int]]) -> None:
    for ids in requests:
        runner.forward(
            types.SimpleNamespace(
                input_ids=torch.tensor(ids),
                positions=torch.arange(len(ids)),
                seq_lens_sum=len(ids),
                rids=None,
                forward_mode=None,
            )
        )


if __name__ == "__main__":
    what, where = sys.argv.pop(1), Path(sys.argv.pop(1))
    {"train": train, "engine": engine}[what](where)
