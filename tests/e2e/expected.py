"""What the collector's contract says, for every test of it."""

from __future__ import annotations

from typing import Any

#: Every switch of the collector on.
EVERYTHING: dict[str, Any] = {
    "msprobe": True,
    "memory_dump": True,
    "configurations_dump": True,
    "key_data_dump": True,
    "reference_dump": True,
    "actor_train_dump": True,
    "actor_infer_dump": True,
    "critic_train_dump": True,
}

#: Key data that the vendor's tool writes, too.
VENDORS = {
    "attention_mask",
    "entropys",
    "input_ids",
    "old_log_probs",
    "position_ids",
    "prompts",
    "responses",
}
