"""What is called an attention: an operator by any part of its name, a module by the end of its."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlprobe.diagnose.cause import attention


def scene(module: str | None, operator: str | None = None) -> Any:
    return SimpleNamespace(origin=SimpleNamespace(module=module, operator=operator), row={})


@pytest.mark.parametrize("module", ["self_attn", "cross_attention", "core_attention", "attn"])
def test_a_module_is_one_by_the_end_of_its_name(module: str) -> None:
    assert attention.is_one(scene(f"model.layers.1.{module}"))


@pytest.mark.parametrize(
    "module",
    ["post_attention_layernorm", "pre_attention_norm", "attention_dropout", "attn_out_proj"],
)
def test_what_stands_beside_one_is_none(module: str) -> None:
    assert not attention.is_one(scene(f"model.layers.1.{module}"))


@pytest.mark.parametrize(
    "operator", ["scaled_dot_product_attention", "npu_fusion_attention", "flash_attn_varlen_func"]
)
def test_an_operator_is_one_by_any_part(operator: str) -> None:
    assert attention.is_one(scene(None, operator))
