"""Which generated tokens are captured: the vendor's token_range_start and token_range_end.

A model is called once per generated token (the prompt's first call gives token 0), so tokens are
counted by calls of the whole model. A new batch of sequences begins with a micro-step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class TokenRange:
    """Switches capture on for the calls of a range.

    Args:
        chosen: first and last token, inclusive, from 0.
        switch: called with whether the call that begins is to be captured.
    """

    def __init__(self, chosen: tuple[int, int], switch: Callable[[bool], None]) -> None:
        self._first, self._last = chosen
        self._switch = switch
        self._token = 0

    def attach(self, model: nn.Module) -> Any:
        """Count the model's calls; returns the hook's handle."""
        self._switch(False)

        def hook(module: nn.Module, args: Any) -> None:
            self._switch(self._first <= self._token <= self._last)
            self._token += 1

        return model.register_forward_pre_hook(hook)

    def restart(self) -> None:
        """New sequences begin: the next call gives token 0."""
        self._token = 0
        self._switch(False)
