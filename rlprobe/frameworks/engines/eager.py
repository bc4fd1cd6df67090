"""What is compiled runs no module's hooks, or fails over them."""

from __future__ import annotations

import os

import torch


def without_dynamo() -> None:
    """Compile nothing more in this process.

    In this process alone: training keeps what it compiles. ``TORCHDYNAMO_DISABLE=0`` keeps it here
    as well. The variable is heeded by what is compiled from here on, the stance by all.
    """
    if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") == "1":
        set_stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
        if set_stance is not None:
            set_stance("force_eager")
