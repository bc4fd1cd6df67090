"""What a model would drop at random while it trains: two devices draw other numbers."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def probabilities(models: Iterable[nn.Module]) -> dict[str, float]:
    """Largest probability of each kind of dropout that is not 0, by name.

    A module of torch's is called as its parent calls it; a number that a module keeps
    (transformers' attention passes its ``attention_dropout`` on) by class and attribute.
    """
    found: dict[str, float] = {}
    for model in models:
        for path, module in model.named_modules():
            for name, value in _of(path, module):
                if value > 0:
                    found[name] = max(value, found.get(name, 0.0))
    return found


def _of(path: str, module: nn.Module) -> Iterable[tuple[str, float]]:
    if isinstance(module, _DropoutNd):
        parts = [part for part in path.split(".") if not part.isdigit()]
        yield parts[-1] if parts else type(module).__name__, float(module.p)
        return
    for name, value in vars(module).items():
        if name.endswith("dropout") and type(value) in (int, float):
            yield f"{type(module).__name__}.{name}", float(value)
