"""A model's state: what one run kept is what another goes on from, and nothing else is believed."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from torch import Tensor, nn  # noqa: E402
from torch.optim import AdamW, Optimizer  # noqa: E402

from rlprobe.capture.joining import Joining  # noqa: E402
from rlprobe.capture.state import index as indexes  # noqa: E402
from rlprobe.capture.state import keep as keeping  # noqa: E402
from rlprobe.capture.state.join import join  # noqa: E402
from rlprobe.capture.state.keep import keep  # noqa: E402
from rlprobe.errors import ReplayError, RunError  # noqa: E402
from tests.unit.capture_helpers import Tiny, make, session, tokens  # noqa: E402


class WithBuffer(nn.Module):
    """A model with a running buffer, a frozen parameter and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tiny()
        self.body.embed.weight.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("angles", torch.arange(4.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        return self.body(ids)


def adamw(model: nn.Module, **settings: Any) -> Optimizer:
    return AdamW(model.parameters(), **{"lr": 0.01, **settings})


def train(model: nn.Module, optimizer: Optimizer, steps: int, scale: float = 1) -> None:
    for _ in range(steps):
        output = model(tokens())
        loss = nn.functional.cross_entropy(output.flatten(0, 1), tokens().flatten())
        (loss * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def kept(directory: Path, model: nn.Module, optimizer: Any, **changes: Any) -> int:
    given = {"role": "actor", "rank": 0, "world_size": 1, "step": 1, **changes}
    return keep(directory, models=[model], optimizer=optimizer, **given)


def joined(directory: Path, model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return join(directory, role="actor", rank=0, models=[model], optimizer=optimizer)


def equal(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.fixture
def benchmark(tmp_path: Path) -> tuple[nn.Module, Optimizer, Path]:
    """A model after two updates, whose state is kept in a directory."""
    model = make(WithBuffer)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    kept(tmp_path / "state", model, optimizer)
    return model, optimizer, tmp_path / "state"


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_training_goes_on_bit_for_bit(benchmark: Any, steps: int) -> None:
    model, optimizer, directory = benchmark
    other = make(WithBuffer)
    own = adamw(other)
    train(other, own, steps, scale=-1)  # it went another way, or has made no step at all
    done = joined(directory, other, own)
    assert equal(model, other)
    assert done["rounded"] == [] and done["generators"] is None
    assert done["states"] < done["parameters"], "the idle parameter has no state"
    for one, its in ((model, optimizer), (other, own)):
        train(one, its, 2)
    assert equal(model, other)


def test_settings_stay_the_replays_own(benchmark: Any) -> None:
    """A wrong epsilon or learning rate must not be healed by what is taken over."""
    model, optimizer, directory = benchmark
    other = make(WithBuffer)
    own = adamw(other, lr=0.5, eps=1e-3, betas=(0.5, 0.6), weight_decay=0.0)
    joined(directory, other, own)
    group = own.param_groups[0]
    assert (group["lr"], group["eps"], group["betas"]) == (0.5, 1e-3, (0.5, 0.6))
    train(model, optimizer, 1)
    train(other, own, 1)
    assert not equal(model, other)


def test_a_benchmark_without_state_takes_it_away(tmp_path: Path) -> None:
    first = make(WithBuffer)
    kept(tmp_path, first, adamw(first))
    other = make(WithBuffer)
    own = adamw(other)
    train(other, own, 2)
    assert joined(tmp_path, other, own)["states"] == 0
    assert all(not state for state in own.state.values()) and equal(first, other)


def test_keeping_changes_nothing(tmp_path: Path) -> None:
    plain, watched = make(WithBuffer), make(WithBuffer)
    for model in (plain, watched):
        torch.manual_seed(3)
        optimizer = adamw(model)
        train(model, optimizer, 2)
        if model is watched:
            kept(tmp_path, model, optimizer)
        train(model, optimizer, 2)
    assert equal(plain, watched)


def test_generators_go_on_where_the_benchmark_was(benchmark: Any) -> None:
    model, optimizer, directory = benchmark
    kept(directory, model, optimizer)
    drawn = (torch.rand(3), np.random.rand(3), random.random())
    torch.manual_seed(77)
    np.random.seed(77)
    random.seed(77)
    joined(directory, make(WithBuffer), adamw(make(WithBuffer)))
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])
    assert random.random() == drawn[2]


@pytest.mark.parametrize("into", ["float64", "bfloat16"])
def test_other_formats_say_whether_they_rounded(benchmark: Any, into: str) -> None:
    model, _, directory = benchmark
    other = make(WithBuffer).to(getattr(torch, into))
    own = adamw(other)
    done = joined(directory, other, own)
    assert bool(done["rounded"]) == (into == "bfloat16")
    name = "body.head.weight"
    if into == "float64":
        left, right = model.get_parameter(name), other.get_parameter(name)
        assert (
            torch.equal(left.double(), right)
            and own.state[right]["exp_avg"].dtype == left.double().dtype
        )
    else:
        assert name in done["rounded"] and f"exp_avg of {name}" in done["rounded"]


def test_many_files_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "FILE_BYTES", 4000)
    model = make()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    written = kept(tmp_path, model, optimizer)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    parameters = sum(p.numel() for p in model.parameters())
    assert written >= 3 * 4 * parameters
    other = make()
    joined(tmp_path, other, adamw(other))
    assert equal(model, other)


def test_optimizers_of_another_kind_are_refused(benchmark: Any, tmp_path: Path) -> None:
    _, _, directory = benchmark
    model = make(WithBuffer)
    trained = [p for p in model.parameters() if p.requires_grad]
    momentum = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    train(model, momentum, 1)
    with pytest.raises(RunError, match="keeps exp_avg, exp_avg_sq, step, this one"):
        joined(directory, model, momentum)

    class Megatrons:
        state = None

    with pytest.raises(RunError, match="Megatrons does not keep its state by parameter"):
        kept(tmp_path / "other", model, Megatrons())

    whole = adamw(model)
    whole.state[trained[0]] = {"factors": torch.zeros(5)}
    with pytest.raises(RunError, match="keeps 'factors' of"):
        kept(tmp_path / "factors", model, whole)


@pytest.mark.parametrize(
    ("masters", "moments", "refused"),
    [
        (False, torch.float32, False),
        (True, torch.float32, True),
        (False, torch.bfloat16, True),
        (False, torch.uint8, True),
    ],
)
def test_state_in_a_form_of_the_optimizers_own_is_refused(
    tmp_path: Path, masters: bool, moments: Any, refused: bool
) -> None:
    """As of Transformer Engine's Adam: copies of weights, and factors beside what is kept."""
    model = make(WithBuffer)
    optimizer: Any = adamw(model)
    train(model, optimizer, 1)
    optimizer.master_weights = masters
    optimizer.name_to_dtype_map = {
        "exp_avg": moments, "exp_avg_sq": torch.float32, "master_param": torch.float32,
    }  # fmt: skip
    expected = (
        pytest.raises(RunError, match="use_precision_aware_optimizer to false on both sides")
        if refused
        else contextlib.nullcontext()
    )
    with expected:
        kept(tmp_path / "state", model, optimizer)


class Smaller(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.body.head = nn.Linear(24, 20, bias=False)


class Larger(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.ones(2))


class OtherBuffer(WithBuffer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Smaller, r"has shape \[40, 24\] on the benchmark, \[20, 24\] here"),
        (Larger, "holds no more of actor"),
        (OtherBuffer, "holds no buffer counts"),
    ],
)
def test_another_model_is_refused(
    benchmark: Any, build: Callable[[], nn.Module], said: str
) -> None:
    other = make(build)
    with pytest.raises(ReplayError, match=said):
        joined(benchmark[2], other, adamw(other))


def changed(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "actor-rank0.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(format=99), "format"),
        (lambda raw: raw.update(files=["../../secret.safetensors"]), "no file beside it"),
        (lambda raw: raw.update(files=["absent.safetensors"]), "not readable"),
        (lambda raw: raw.update(files=[]), "no file of actor holds weight:"),
        (lambda raw: raw.update(world_size=2), "a part is missing"),
        (lambda raw: raw.update(rank="0"), "whole numbers"),
        (lambda raw: raw.update(code="import os"), "no index"),
        (lambda raw: raw["parameters"]["idle"].update(shape=[-1]), "a shape that is none"),
        (lambda raw: raw["parameters"]["idle"].update(local_shape=[9]), r"not \[9\]"),
        (lambda raw: raw["parameters"]["idle"].update(numbers={"step": "x"}), "no number"),
        (lambda raw: raw["parameters"]["idle"].update(complete=False), "is not known"),
        (
            lambda raw: raw["parameters"]["idle"].update(
                complete=False, offset={"dim": 0, "index": 2}
            ),
            "does not fit",
        ),
        (lambda raw: raw["generators"].update(numpy=[1]), "rank 0 are damaged"),
        (lambda raw: raw["generators"].pop("python"), "rank 0 are damaged"),
    ],
)
def test_a_damaged_index_is_refused_in_a_sentence(
    benchmark: Any, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    changed(benchmark[2], change)
    other = make(WithBuffer)
    with pytest.raises(ReplayError, match=said):
        joined(benchmark[2], other, adamw(other))


def test_a_file_that_is_no_safetensors_is_not_opened(benchmark: Any) -> None:
    (benchmark[2] / "actor-rank0-000.safetensors").write_bytes(b"\x80\x04cos\nsystem\n.")
    other = make(WithBuffer)
    with pytest.raises(ReplayError, match="not readable"):
        joined(benchmark[2], other, adamw(other))
    with pytest.raises(ReplayError, match="holds no state of the critic"):
        indexes.read_all(benchmark[2], "critic")


def test_only_the_first_stage_of_a_captured_later_step_joins(tmp_path: Path) -> None:
    """Step 0 begins from what both sides load themselves; after that, once a role and step."""
    source = session(tmp_path / "benchmark", step_start=0, step_end=2, ranks=(5,))
    object.__setattr__(source, "keep_states", True)
    model = make()
    optimizer = adamw(model)
    hooks = Joining(source, 0, 1)
    states = tmp_path / "benchmark" / "side" / "states"
    beginnings = []
    for step in range(4):
        beginnings.append(copy.deepcopy(model))
        for _ in ("log_prob", "update"):
            hooks.enter("actor", step, model, optimizer)
            hooks.enter("ref", step, model, None)
        train(model, optimizer, 1)
    assert sorted(path.name for path in states.iterdir()) == ["step1", "step2"]

    target = session(tmp_path / "target", step_start=1, step_end=1)
    object.__setattr__(target, "join_states", str(states))
    other = make()
    own = adamw(other)
    hooks = Joining(target, 0, 1)
    for step in range(3):
        train(other, own, 1, scale=-1)
        hooks.enter("actor", step, other, own)
        assert equal(other, beginnings[step]) == (step == 1)
        train(other, own, 1)
        hooks.enter("actor", step, other, own)
        assert not equal(other, beginnings[step]), "an update within the step is not undone"
    lines = (tmp_path / "target/side/parts/joined/actor-rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1]


@pytest.mark.parametrize(
    ("touch", "names"),
    [
        (lambda m, o: None, []),
        (lambda m, o: m.head.weight.data.mul_(1.001), ["head.weight"]),
        (lambda m, o: m.head.weight.data.view(-1)[0].add_(1e-6), ["head.weight"]),
        (lambda m, o: train(m, o, 1), None),  # a second update that nobody captured
        (lambda m, o: m.to(torch.bfloat16).to(torch.float32), None),  # rounded on the way
    ],
)
def test_what_moves_weights_behind_an_update_is_named_before_they_are_overwritten(
    tmp_path: Path, touch: Any, names: list[str] | None
) -> None:
    source = session(tmp_path / "benchmark", step_start=0, step_end=1)
    object.__setattr__(source, "keep_states", True)
    model = make()
    Joining(source, 0, 1).enter("actor", 1, model, adamw(model))
    target = session(tmp_path / "target", step_start=0, step_end=1)
    object.__setattr__(target, "join_states", str(tmp_path / "benchmark" / "side" / "states"))
    other = make()
    own = adamw(other)
    hooks = Joining(target, 0, 1)
    hooks.enter("actor", 0, other, own)
    train(other, own, 1)
    hooks.left("actor", 0, [other])
    touch(other, own)
    hooks.enter("actor", 1, other, own)
    line = json.loads((tmp_path / "target/side/parts/joined/actor-rank0.jsonl").read_text())
    every = len(list(other.parameters()))
    assert line["left"]["compared"] == every
    assert line["left"]["names"] == names if names is not None else line["left"]["moved"] > 1
    assert line["left"]["moved"] == len(line["left"]["names"]) or line["left"]["moved"] > 8


@pytest.mark.slow
def test_every_sharding_takes_over_from_every_other(root: Path, tmp_path: Path) -> None:
    """FSDP2 over two ranks, FSDP1 with and without original parameters, and one process."""
    script = Path(__file__).with_name("capture_state_run.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), "2", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate()[0] for process in ranks]
    assert all(process.returncode == 0 for process in ranks), "\n".join(said)[-4000:]
    found = []
    for kind in ("fsdp2", "fsdp1", "fsdp1-original"):
        shards = json.loads((tmp_path / kind / "actor-rank1.json").read_text())["parameters"]
        assert any(not entry["complete"] for entry in shards.values()), "nothing was sharded"
        model = make(lambda: Tiny(width=22))
        optimizer = adamw(model)
        done = joined(tmp_path / kind, model, optimizer)
        assert done["states"] == done["parameters"] == len(list(model.parameters()))
        states = [optimizer.state[p] for p in model.parameters()]
        assert {float(state["step"]) for state in states} == {3.0}
        found.append((model, states))
    first, its = found[0]
    for model, states in found[1:]:
        assert equal(first, model)
        for one, other in zip(its, states, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in ("exp_avg", "exp_avg_sq"))
    whole = make(lambda: Tiny(width=22))
    assert not equal(whole, first), "it was trained"
