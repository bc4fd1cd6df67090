"""Is dropout that is on recorded, in the two forms that models have it?"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from torch import nn

from rlprobe.capture.dropout import probabilities


class Attention(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.attention_dropout = p
        self.use_dropout = p > 0
        self.resid_dropout = nn.Dropout(2 * p)


def test_both_forms_are_found_and_the_largest_of_a_kind_counts() -> None:
    layers = nn.ModuleList([Attention(0.1), Attention(0.2), Attention(0.0)])
    head = nn.Sequential(nn.Linear(2, 2), nn.Dropout1d(0.3))
    assert probabilities([layers, head]) == {
        "Attention.attention_dropout": 0.2, "resid_dropout": 0.4, "Dropout1d": 0.3,
    }  # fmt: skip


def test_zero_is_nothing() -> None:
    assert probabilities([Attention(0.0), nn.Dropout(0.0)]) == {}


def test_a_real_models_attention_is_found() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, attention_dropout=0.25,
    )  # fmt: skip
    found = probabilities([transformers.Qwen2ForCausalLM(config)])
    assert found == {"Qwen2Attention.attention_dropout": 0.25}
