"""The light engine and msprobe's own L0 on the same model and tokens, in one process.

python tests/unit/capture_against_msprobe_run.py DIRECTORY
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
from capture_helpers import UPDATE, recorder
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM


def qwen2(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        attn_implementation="eager",
        use_cache=False,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(dtype)


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    models = {name: qwen2(getattr(torch, name)) for name in ("float32", "bfloat16")}
    copies = copy.deepcopy(models)
    for name, model in models.items():
        with recorder(root / name).stage(UPDATE, 0, 1, model):
            for _ in range(2):
                model(input_ids=tokens, labels=tokens).loss.backward()
    config = root / "config.json"
    own = {"task": "statistics", "dump_path": str(root / "msprobe"), "level": "L0"}
    config.write_text(json.dumps({**own, "rank": [], "step": [], "statistics": {}}))
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=str(config))
    for model in copies.values():
        debugger.start(model=model, rank_id=0)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
        debugger.stop()
        debugger.step()


if __name__ == "__main__":
    main()
