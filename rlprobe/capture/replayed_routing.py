"""Tokens are sent to the experts that another run chose.

A router that decides otherwise sends a token another way, and everything behind it differs: what
the rest of the model computes cannot be judged any more. Where routing is replayed, routers score
their experts as ever and take the recorded ones, with their own scores for them, so that the rest
is compared. What a router would have chosen itself is what is recorded of it.

It works on whatever router chooses by ``torch.topk`` over all experts: transformers' and
megatron-core's, with gradients. A fused kernel that chooses by itself is refused. Tokens that the
other run has no choice for (padding) keep their own. Of routers that choose among groups of experts
first, scores outside the chosen groups are masked before, and weigh nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlprobe.capture.light.coordinates import Tokens
from rlprobe.errors import ReplayError

_TOP = (torch.topk, Tensor.topk)


class RecordedRouting:
    """The choices of one stage and step.

    Args:
        path: a file as :mod:`rlprobe.capture.light.routing` writes it.

    Raises:
        ReplayError: there is none.
    """

    def __init__(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
        except (OSError, ValueError) as error:
            raise ReplayError(
                f"routing is to be replayed, and {path} has no choices of experts: {error}; "
                "the benchmark has none of this stage and step"
            ) from error
        self._modules: dict[str, tuple[npt.NDArray[np.uint64], npt.NDArray[np.int16], int]] = {}
        for number, module in enumerate(arrays["modules"].tolist()):
            own = arrays["module"] == number
            token, chosen = arrays["token"][own], arrays["chosen"][own]
            # the first of a token that occurs again
            token, first = np.unique(token, return_index=True)
            self._modules[module] = token, chosen[first], int(arrays["experts"][number])

    def experts(self, module: str) -> int | None:
        """How many experts a router chose from; None for a module that is no router."""
        found = self._modules.get(module)
        return None if found is None else found[2]

    def chosen(self, module: str, keys: Tensor) -> Tensor:
        """The experts of some tokens, [tokens, experts of each]; -1 where there are none."""
        token, chosen, _ = self._modules[module]
        wanted = keys.cpu().numpy().view(np.uint64)
        at = np.minimum(np.searchsorted(token, wanted), len(token) - 1)
        found = np.where((token[at] == wanted)[:, None], chosen[at], -1)
        return torch.from_numpy(found.astype(np.int64)).to(keys.device)


class ReplayedRouting:
    """Replays one stage's choices while it is attached.

    Args:
        recorded: the choices.
        tokens: which of them the model works on.
    """

    def __init__(self, recorded: RecordedRouting, tokens: Tokens) -> None:
        self._recorded = recorded
        self._tokens = tokens
        #: What routers chose themselves in their latest calls, by path.
        self._own: dict[str, Tensor] = {}
        self._open: list[_Replay] = []

    def attach(self, path: str, module: nn.Module, track: Callable[[Any], None]) -> None:
        """Replay a module's choices, if it is a router that was recorded."""
        experts = self._recorded.experts(path)
        if experts is None:
            return

        def before(module: nn.Module, args: Any) -> None:
            self._own.pop(path, None)
            mode = _Replay(experts, lambda rows: self._chosen(path, rows))
            self._open.append(mode)
            mode.__enter__()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not self._open:
                return
            mode = self._open.pop()
            mode.__exit__(None, None, None)
            if mode.own is not None:
                self._own[path] = mode.own
            elif output is not None:
                raise ReplayError(
                    f"routing is to be replayed, and {path} ({type(module).__name__}) does not "
                    "choose by torch.topk: a fused kernel does it; switch that off (Megatron: "
                    "moe_router_fusion=false), or set routing: own"
                )

        track(module.register_forward_pre_hook(before))
        track(module.register_forward_hook(after, always_call=True))

    def own(self, path: str) -> Tensor | None:
        """What a router chose itself in its latest call, [tokens, experts of each]."""
        return self._own.get(path)

    def _chosen(self, path: str, rows: int) -> Tensor | None:
        """The recorded experts of each of a router's rows; None where rows are not known."""
        batch = self._tokens.batch
        if batch is None:
            return None
        for own in (batch, self._tokens.stretch(batch)):
            keys = None if own is None else own.row_keys()
            if keys is not None and len(keys) == rows:
                return self._recorded.chosen(path, keys)
        return None


class _Replay(TorchFunctionMode):
    """Puts recorded choices in the place of a router's own."""

    def __init__(self, experts: int, chosen: Callable[[int], Tensor | None]) -> None:
        super().__init__()
        self._experts = experts
        self._chosen = chosen
        self.own: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _TOP:
            return found
        scores: Tensor = args[0] if args else kwargs["input"]
        if scores.dim() != 2 or scores.shape[1] != self._experts:
            return found
        self.own = found.indices
        recorded = self._chosen(len(scores))
        if recorded is None or recorded.shape[1] != found.indices.shape[1]:
            return found
        known = (recorded >= 0).all(dim=1, keepdim=True)
        target = torch.where(known, recorded, found.indices)
        # in the order of the scores, as the router's own would be: the same ones give the same bits
        values, order = scores.gather(1, target).sort(dim=1, descending=True, stable=True)
        return torch.return_types.topk((values, target.gather(1, order)))
