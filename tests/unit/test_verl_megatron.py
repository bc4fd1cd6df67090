"""verl's Megatron engine through a stand-in with its methods: which micro-batch is whose?"""

from __future__ import annotations

import functools
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from rlprobe.frameworks.verl import megatron


class MegatronEngine:
    """Calls its methods as verl 0.9.1's does, without Megatron: interleaved chunks."""

    def __init__(self, chunks: int, last: bool = True) -> None:
        self.module = [Wrapped() for _ in range(chunks)]
        self.last = last
        self.forwards: list[tuple[int, Any]] = []

    def forward_backward_batch(self, data: list[Any]) -> list[Any]:
        post = functools.partial(self.postprocess_micro_batch_func, forward_only=True)
        iterators = [iter(data) for _ in self.module]
        found = []
        for _ in data:
            for index, chunk in enumerate(self.module):
                output, finish = self.forward_step(
                    iterators[index],
                    chunk.module,
                    logits_processor_func=None,
                    postprocess_micro_batch_func=post,
                )
                if self.last and index == len(self.module) - 1:
                    found.append(finish(output))
        return found

    def forward_step(
        self,
        batch_iter: Iterator[Any],
        model: Any,
        logits_processor_func: Any = None,
        postprocess_micro_batch_func: Any = None,
    ) -> Any:
        batch = next(batch_iter)
        index = next(i for i, chunk in enumerate(self.module) if chunk.module is model)
        self.forwards.append((index, batch))
        return f"out {batch}", functools.partial(postprocess_micro_batch_func, data=batch)

    def postprocess_micro_batch_func(self, output: Any, data: Any, forward_only: bool) -> Any:
        return f"loss {data}", {"model_output": output}


class Wrapped:
    """A chunk in the wrapper that Megatron puts around it."""

    def __init__(self) -> None:
        self.module = object()


class Engine(MegatronEngine):
    """A subclass, as the ones with heads are."""


@pytest.mark.cell("back end", "Megatron: micro-batches, chunks and losses", "contract-tested")
@pytest.mark.parametrize("chunks", [1, 2])
def test_every_chunk_and_loss_is_of_its_micro_batch(chunks: int) -> None:
    engine = Engine(chunks)
    assert megatron.is_megatron(engine)
    begun: list[tuple[int, Any, bool]] = []
    ended: list[tuple[int, Any, Any]] = []
    megatron.watch(engine, lambda *found: begun.append(found), lambda *found: ended.append(found))
    for batch in (["a", "b", "c"], ["d"]):
        engine.forward_backward_batch(batch)
    plain = Engine(chunks)
    for batch in (["a", "b", "c"], ["d"]):
        plain.forward_backward_batch(batch)
    assert engine.forwards == plain.forwards, "the engine must see what it would see without us"
    with_data = [(number, data) for number, data, first in begun if first]
    assert with_data == [(0, "a"), (1, "b"), (2, "c"), (0, "d")]
    assert len(begun) == chunks * 4
    later = [(number, data) for number, data, first in begun if not first]
    assert later == (with_data if chunks == 2 else [])
    assert ended == [(n, f"loss {data}", {"model_output": f"out {data}"}) for n, data in with_data]


def test_a_rank_without_the_last_stage_has_no_losses() -> None:
    engine = Engine(1, last=False)
    begun: list[Any] = []
    ended: list[Any] = []
    megatron.watch(engine, lambda *found: begun.append(found), lambda *found: ended.append(found))
    engine.forward_backward_batch(["a", "b"])
    assert begun == [(0, "a", True), (1, "b", True)]
    assert ended == []


def test_an_exhausted_iterator_ends_as_it_would_without_us() -> None:
    engine = Engine(1)
    megatron.watch(engine, lambda *_: None, lambda *_: None)
    with pytest.raises(StopIteration):
        engine.forward_step(iter(()), engine.module[0].module)


@pytest.fixture
def mindspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stands in for MindSpeed, whose ``repatch`` replaces methods of Megatron's; who was called."""
    called: list[str] = []
    original = MegatronEngine.forward_step

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append("mindspeed")
        return original(self, *args, **kwargs)

    def repatch(config: Any) -> None:
        monkeypatch.setattr(MegatronEngine, "forward_step", patched)

    adaptor = types.ModuleType("mindspeed.megatron_adaptor")
    adaptor.repatch = repatch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mindspeed", types.ModuleType("mindspeed"))
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", adaptor)
    yield called


class Worker:
    """Builds its engine in ``reset``, where verl's engine lets MindSpeed patch again."""

    engine: Any = None

    def reset(self) -> str:
        from mindspeed.megatron_adaptor import repatch

        repatch({})
        self.engine = Engine(1)
        self.engine.train_batch = self.engine.infer_batch = self.engine.forward_backward_batch
        self.engine.optimizer_step = lambda: None
        return "ready"


@pytest.mark.cell("back end", "Megatron: MindSpeed patches before our hooks", "contract-tested")
def test_mindspeeds_patches_are_inside_ours(
    mindspeed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from rlprobe.frameworks.verl import workers

    def begins(number: int, data: Any, first: bool) -> None:
        mindspeed.append("begins")

    session = types.SimpleNamespace(perturbed=0)
    monkeypatch.setattr("rlprobe.frameworks.verl.workers.control.session", lambda: session)
    monkeypatch.setattr("rlprobe.frameworks.verl.workers.determinism.apply", lambda session: None)
    monkeypatch.setattr(workers, "_megatron_begins", begins)
    monkeypatch.setattr(workers, "_megatron_ends", lambda *found: mindspeed.append("ends"))
    worker = Worker()
    assert workers.around_reset(Worker.reset, worker, (), {}) == "ready"
    worker.engine.train_batch(["a"])
    assert mindspeed == ["begins", "mindspeed", "ends"]


@pytest.mark.cell("back end", "Megatron: MindSpeed patches before our hooks", "contract-tested")
def test_our_hooks_import_no_megatron() -> None:
    """MindSpeed must be imported before Megatron, which is verl's to see to."""
    program = (
        "import sys; from rlprobe.frameworks import verl; verl.activate();"
        "import rlprobe.frameworks.verl.workers;"
        "sys.exit(any(name.split('.')[0] == 'megatron' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
