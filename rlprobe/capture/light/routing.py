"""Which experts every token was sent to.

``{side}/routing/{stage}-step{N}-rank{R}.npz`` (numpy arrays, no pickles) holds a row per token of
every router's call:

- ``module``: index into ``modules``, the routers' Hugging Face paths, and into ``experts``, the
  numbers of experts that they choose from;
- ``token``: the token's key (:mod:`rlprobe.coordinates`), the same in every layout;
- ``chosen``: int16, shape (rows, experts of a token): numbers among all experts, ascending, -1 for
  none (a token that was dropped, or a router with fewer).

Besides: ``left_out``, tokens that the disk budget did not admit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rlprobe.capture.engine import StageContext
from rlprobe.capture.light.coordinates import Tokens
from rlprobe.capture.light.routers import NONE, Choice
from rlprobe.capture.replayed_routing import ReplayedRouting
from rlprobe.files import written

_Keys = npt.NDArray[np.uint64]


class ChosenExperts:
    """One stage's choices of experts, growing call by call.

    Args:
        side: the session's side directory.
        context: stage, step and rank.
        budget: bytes that this file may take.
        tokens: which of them the model works on.
    """

    def __init__(self, side: Path, context: StageContext, budget: int, tokens: Tokens) -> None:
        name = f"{context.stage}-step{context.step}-rank{context.rank}.npz"
        self.path = side / "routing" / name
        self.tokens = tokens
        #: What replays another run's choices, if any does.
        self.replayed: ReplayedRouting | None = None
        self._budget = budget
        self._left_out = 0
        self._experts: dict[str, int] = {}
        self._rows: list[tuple[str, _Keys, Tensor]] = []

    def add(self, path: str, choice: Choice) -> None:
        """Keep a router's choice for each of its tokens; its own, where another's is replayed."""
        batch = self.tokens.batch
        replaced = None if self.replayed is None else self.replayed.own(path)
        for own in () if batch is None else (batch, self.tokens.stretch(batch)):
            if own is None:
                continue
            rows = own.rows(choice.chosen if replaced is None else replaced)
            if rows is None:
                continue
            numbers = choice.numbers(rows) if replaced is None else rows.sort(dim=-1).values
            size = numbers.numel() * 2 + len(own.keys) * 12
            if size > self._budget:
                self._left_out += len(own.keys)
                return
            self._budget -= size
            self._experts[path] = choice.experts
            self._rows.append((path, own.keys, numbers))
            return

    def publish(self) -> None:
        """Write the file with everything so far; nothing where there is nothing."""
        if not self._rows and not self._left_out:
            return
        modules = list(self._experts)
        width = max((numbers.shape[1] for _, _, numbers in self._rows), default=1)
        found: list[tuple[npt.NDArray[Any], ...]] = []
        for path, keys, numbers in self._rows:
            chosen = np.full((len(keys), width), NONE, np.int16)
            chosen[:, : numbers.shape[1]] = numbers.cpu().numpy()
            module = np.full(len(keys), modules.index(path), np.int32)
            found.append((module, keys, chosen))
        if not found:
            found = [(np.zeros(0, np.int32), np.zeros(0, np.uint64), np.zeros((0, 1), np.int16))]
        module, token, every = (np.concatenate(column) for column in zip(*found, strict=True))
        with written(self.path) as temporary, temporary.open("wb") as handle:
            np.savez(
                handle,
                modules=np.array(modules, dtype=np.str_),
                experts=np.array([self._experts[path] for path in modules], dtype=np.int32),
                module=module,
                token=token,
                chosen=every,
                left_out=np.int64(self._left_out),
            )
