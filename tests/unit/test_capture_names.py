"""Have modules and parameters the plain model's names, whatever is wrapped around them?"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from rlprobe.capture.names import class_name, named_modules, parameter_name, unwrap  # noqa: E402
from tests.unit.capture_helpers import Tiny, make  # noqa: E402


def test_names_have_no_wrappers() -> None:
    class PeftModelForCausalLM(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.base_model = inner

    class LoraModel(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.model = inner

    class CheckpointWrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = inner

    inner = Tiny()
    inner.layers[0] = CheckpointWrapper(inner.layers[0])
    model = PeftModelForCausalLM(LoraModel(inner))
    prefix, root = unwrap(model)
    assert (prefix, root) == ("base_model.model.", inner)
    names = [record for record, _, _ in named_modules([model])]
    assert "Module.layers.0.Block" in names and "Module.layers.0.up.Linear" in names
    assert not any("Wrapper" in name or "Lora" in name or "base_model" in name for name in names)
    raw = "base_model.model.layers.0._checkpoint_wrapped_module.up.base_layer.weight"
    assert parameter_name(raw, prefix) == "layers.0.up.weight"


def test_fsdp2s_classes_have_their_own_names_back() -> None:
    class FSDPModule:
        pass

    class Own(nn.Module):
        pass

    class FSDPish(nn.Module):
        """A class of the model's own that only begins like one of FSDP2's."""

    sharded = type("FSDPOwn", (FSDPModule, Own), {})()
    assert class_name(sharded) == "Own"
    assert class_name(FSDPish()) == "FSDPish"


def test_a_wrapper_is_one_under_fsdp2_too() -> None:
    """LoRA under FSDP2: the root's class is ``FSDPPeftModelForCausalLM``."""
    peft = type("PeftModelForCausalLM", (nn.Module,), {})
    sharded = type("FSDPPeftModelForCausalLM", (type("FSDPModule", (), {}), peft), {})()
    sharded.base_model = type("LoraModel", (nn.Module,), {})()
    sharded.base_model.model = make()
    prefix, model = unwrap(sharded)
    assert (prefix, type(model)) == ("base_model.model.", Tiny)
    assert "Module.head.Linear" in {record for record, _, _ in named_modules([sharded])}
