"""Tiny models and prompts, made on first use: what the CPU default trains.

    python -m rlprobe.frameworks.verl.host.assets DIRECTORY builtin:NAME…

Same name and version, same weights, on every machine and under any kernels (see :func:`_fill`). A
byte-level vocabulary needs no training corpus, and the critic has its value head saved with it
because verl would draw one unseeded. Nothing heavy is imported until something is made.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlprobe.errors import ConfigError
from rlprobe.store.assets import seal

BUILTIN = "builtin:"
#: Part of a run's identity: raise it when a generator changes what it makes.
VERSION = 2

#: Standard deviation of weights: large enough that attention and logits are not all alike in an
#: untrained model.
_SPREAD = 0.2
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def path_of(name: str, directory: Path) -> Path:
    """Where ``builtin:NAME`` lies under ``directory`` once made.

    Raises:
        ConfigError: no such builtin; the message lists them.
    """
    plain = name.removeprefix(BUILTIN)
    if plain not in _MAKERS:
        raise ConfigError(
            f"{name!r} is not a builtin; accepted: "
            + ", ".join(f"{BUILTIN}{known}" for known in sorted(_MAKERS))
        )
    suffix = ".parquet" if plain == "arithmetic" else ""
    return directory / f"{plain}-{VERSION}{suffix}"


def make(name: str, directory: Path) -> Path:
    """Make ``builtin:NAME`` under ``directory`` unless it is there; complete or not at all."""
    target = path_of(name, directory)
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        made = Path(temporary, target.name)
        _MAKERS[name.removeprefix(BUILTIN)](made)
        shutil.move(made, target)
    seal(target)
    return target


def byte_tokenizer(vocabulary: dict[str, int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = _CHAT
    return fast


def byte_vocabulary(multiple: int = 1) -> dict[str, int]:
    """Bytes and special tokens, with unused ones behind them up to a multiple."""
    from tokenizers import pre_tokenizers

    symbols = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += [f"<|unused_{index}|>" for index in range(-len(symbols) % multiple)]
    return {symbol: index for index, symbol in enumerate(symbols)}


def _shape(vocabulary: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": vocabulary["<bos>"],
        "eos_token_id": vocabulary["<eos>"],
        "pad_token_id": vocabulary["<pad>"],
    }


#: What splits evenly: layers over two pipeline ranks of two chunks, the vocabulary over eight.
_SPLITS: dict[str, Any] = {"num_hidden_layers": 4}
_MULTIPLE = 8

#: Heads of 32, the fewest that vLLM's attention on a CPU takes.
_WIDE_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
}

#: The same without experts that every token has, as mbridge's layers without Transformer Engine
#: take them; experts split over up to eight ranks.
_SPLIT_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "head_dim": 16,
}


def _fill(model: Any, seed: int) -> None:
    """Draw every weight anew from a generator whose numbers are the same everywhere.

    The framework's own initialisation takes logarithms and cosines, which kernels round
    differently: a target that made its own copy would start from other weights. Whole numbers times
    a constant, rounded once, leave no room for that. Matrices are spread evenly with a standard
    deviation of 0.2; of the rest, what normalises is one and biases are zero, as they were.
    """
    import numpy as np
    import torch

    draw = np.random.Generator(np.random.PCG64(seed))
    scale = _SPREAD * 3**0.5 / 2**23
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                continue
            whole = draw.integers(-(2**23), 2**23, size=tuple(parameter.shape), endpoint=True)
            parameter.copy_(torch.from_numpy((whole * scale).astype(np.float32)))
        embedding = model.get_input_embeddings()
        if embedding.padding_idx is not None:
            embedding.weight[embedding.padding_idx] = 0.0


def _causal(
    architecture: str, made: Path, *, stops: bool = False, multiple: int = 1, **further: Any
) -> None:
    """A causal model; with ``stops`` one that often ends a response, so that lengths vary."""
    import torch
    import transformers

    vocabulary = byte_vocabulary(multiple)
    shape = {**_shape(vocabulary), **further}
    config = getattr(transformers, f"{architecture}Config")(**shape)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    _fill(model, seed=0)
    if stops:
        with torch.no_grad():
            model.lm_head.weight[vocabulary["<eos>"]] *= 4.0
    model.generation_config.eos_token_id = vocabulary["<eos>"]
    model.generation_config.pad_token_id = vocabulary["<pad>"]
    model.save_pretrained(made)
    byte_tokenizer(vocabulary).save_pretrained(made)


def _critic(
    architecture: str, made: Path, *, bias: float = 0.0, multiple: int = 1, **further: Any
) -> None:
    import torch
    import transformers

    vocabulary = byte_vocabulary(multiple)
    shape = {**_shape(vocabulary), **further, "num_labels": 1, "classifier_dropout": 0.0}
    config = getattr(transformers, f"{architecture}Config")(**shape)
    model = getattr(transformers, f"{architecture}ForTokenClassification")(config)
    _fill(model, seed=1)
    with torch.no_grad():
        model.score.bias.fill_(bias)
    model.save_pretrained(made)
    byte_tokenizer(vocabulary).save_pretrained(made)


def _arithmetic(made: Path) -> None:
    import pandas

    sums = [(a, b) for a in range(4) for b in range(4)]
    rows = [
        {
            "data_source": "rlprobe/arithmetic",
            "prompt": [{"role": "user", "content": f"What is {a}+{b}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (a, b) in enumerate(sums)
    ]
    pandas.DataFrame(rows).to_parquet(made)


_MAKERS: dict[str, Callable[[Path], None]] = {
    "tiny-qwen2": lambda made: _causal("Qwen2", made),
    "tiny-llama": lambda made: _causal("Llama", made),
    "tiny-qwen2-brief": lambda made: _causal("Qwen2", made, stops=True),
    "tiny-qwen2-wide-heads": lambda made: _causal("Qwen2", made, **_WIDE_HEADS),
    "tiny-qwen2-wide-heads-critic": lambda made: _critic("Qwen2", made, **_WIDE_HEADS),
    "tiny-qwen2-moe": lambda made: _causal("Qwen2Moe", made, **_EXPERTS),
    "tiny-qwen2-moe-wide-heads": lambda made: _causal("Qwen2Moe", made, **_EXPERTS, **_WIDE_HEADS),
    "tiny-qwen2-splits": lambda made: _causal("Qwen2", made, multiple=_MULTIPLE, **_SPLITS),
    "tiny-qwen3-moe-splits": lambda made: _causal(
        "Qwen3Moe", made, multiple=_MULTIPLE, **_SPLITS, **_SPLIT_EXPERTS
    ),
    "tiny-qwen2-splits-critic": lambda made: _critic("Qwen2", made, multiple=_MULTIPLE, **_SPLITS),
    "tiny-qwen2-critic": lambda made: _critic("Qwen2", made),
    "tiny-qwen2-critic-bias": lambda made: _critic("Qwen2", made, bias=0.5),
    "tiny-llama-critic": lambda made: _critic("Llama", made),
    "arithmetic": _arithmetic,
}

_DATA = frozenset({"arithmetic"})
#: What may follow ``builtin:``, of a model and of data.
NAMES: dict[str, frozenset[str]] = {"model": frozenset(_MAKERS) - _DATA, "data": _DATA}


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        print(make(_name, Path(sys.argv[1])))
