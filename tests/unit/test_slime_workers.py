"""Are slime's stages told apart, each with a dump of its own, and is what slime computes kept?

A plain torch model and functions of slime's shape; no slime, no Megatron.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlprobe import stages
from rlprobe.capture.session import CaptureOptions, Session
from rlprobe.errors import HookError
from rlprobe.frameworks.slime import control, metrics, running, updates, workers


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x)))


class Iterator:
    def __init__(self, rollout_data: dict[str, Any], schedule: list[list[int]] | None, size: int):
        self.rollout_data = rollout_data
        self.micro_batch_indices = schedule
        self.micro_batch_size = size


def forward_only(f: Any, args: Any, model: Any, data_iterator: Any, store_prefix: str = "") -> Any:
    with torch.no_grad():
        model[0](torch.ones(1, 4))
    rows = len(data_iterator[0].rollout_data["response_lengths"])
    return {f"{store_prefix}{f}": [torch.full((2,), -1.0 - row) for row in range(rows)]}


def loss_function(args: Any, batch: Any, num_microbatches: int, logits: torch.Tensor) -> Any:
    loss = logits.sum()
    values = torch.stack([torch.tensor(2.0), loss.detach(), loss.detach() * 0 + 0.5])
    return loss, 1, {"keys": ["pg_loss", "clip"], "values": values}


def train(rollout_id: int, model: Any, optimizer: Any, scheduler: Any, data_iterator: Any) -> None:
    optimizer.zero_grad()
    logits = model[0](torch.ones(1, 4))
    updates.loss_function(loss_function, ("args", {}, 1, logits), {})[0].backward()
    optimizer.step()


class Actor:
    """An actor of slime's shape; its functions are hooked as the real ones are."""

    def __init__(self, role: str = "actor", **args: Any) -> None:
        torch.manual_seed(0)
        defaults = {"with_ref": True, "runs_old": True, "save_debug_train_data": None}
        self.args = types.SimpleNamespace(**(defaults | args))
        self.role = role
        self.model = [Tiny()]
        self.optimizer = torch.optim.SGD(self.model[0].parameters(), lr=0.1)
        self.schedule: list[list[int]] | None = [[1], [0]]

    def iterator(self, rollout_data: dict[str, Any]) -> list[Iterator]:
        return [Iterator(rollout_data, self.schedule, 2)]

    def compute_log_prob(self, data_iterator: Any, store_prefix: str = "") -> Any:
        return hooked(workers.forward_only, forward_only)(
            "log_probs", self.args, self.model, data_iterator, store_prefix
        )

    def train_actor(self, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        iterator = self.iterator(rollout_data)
        log_prob = method(workers.around_compute_log_prob, type(self).compute_log_prob)
        if self.args.with_ref:
            rollout_data.update(log_prob(self, iterator, store_prefix="ref_"))
        if self.args.runs_old:
            rollout_data.update(log_prob(self, iterator))
        rollout_data["advantages"] = [torch.ones(2), torch.zeros(1)]
        self._train(rollout_id, iterator)

    def train_critic(self, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        iterator = self.iterator(rollout_data)
        values = hooked(workers.forward_only, forward_only)
        rollout_data.update(values("values", self.args, self.model, iterator))
        self._train(rollout_id, iterator)

    def _train(self, rollout_id: int, iterator: Any) -> None:
        hooked(workers.train, train)(rollout_id, self.model, self.optimizer, None, iterator)


def hooked(around: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: around(original, args, kwargs)


def method(around: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: around(original, self, args, kwargs)


train_actor = method(workers.around_train_actor, Actor.train_actor)
train_critic = method(workers.around_train_critic, Actor.train_critic)


def data() -> dict[str, Any]:
    return {
        "tokens": [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 9])],
        "response_lengths": [2, 1],
        "loss_masks": [torch.tensor([1, 0]), torch.tensor([1])],
        "rewards": [1.0, -1.0],
    }


@pytest.fixture
def session(tmp_path: Path):
    def make(**capture: Any) -> Session:
        options = {"stages": stages.TRAINING_STAGES, "step_end": 3, **capture}
        made = Session(
            role="benchmark",
            framework="slime",
            dump=str(tmp_path / "dump"),
            side=str(tmp_path / "side"),
            capture=CaptureOptions(**options),
        )
        control.reset(made, resolved=True)
        return made

    yield make
    control.reset()
    workers._recorders.clear()
    workers._joining = None


def records(tmp_path: Path, stage: str, step: int = 0, file: str = "dump") -> list[str]:
    path = tmp_path / "dump" / stage / f"step{step}" / "rank0" / f"{file}.json"
    return list(json.loads(path.read_text())["data"])


def lines(tmp_path: Path, kind: str, role: str) -> list[dict[str, Any]]:
    path = tmp_path / "side" / "parts" / kind / f"{role}-rank0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_stage_has_its_directory_under_the_name_slimes_users_know(
    tmp_path: Path, session: Any
) -> None:
    session()
    train_actor(Actor(), 0, data())
    train_critic(Actor("critic"), 0, data())
    found = {path.name for path in (tmp_path / "dump").iterdir()} - {"data"}
    assert found == {
        "ref_compute_log_prob",
        "old_log_prob",
        "actor_train",
        "critic_values",
        "critic_train",
    }


def test_a_stage_holds_nothing_of_the_stages_before_it(tmp_path: Path, session: Any) -> None:
    """With one step() at the end, as by the vendor's procedure, dumps accumulate."""
    session()
    actor = Actor()
    for rollout_id in (0, 1):
        train_actor(actor, rollout_id, data())
    for step in (0, 1):
        forward = records(tmp_path, "ref_compute_log_prob", step)
        assert forward == records(tmp_path, "old_log_prob", step)
        assert all(name.endswith(".forward.0") for name in forward)
        update = records(tmp_path, "actor_train", step)
        assert [name for name in update if ".forward." in name] == forward
        assert any(name.endswith(".backward.0") for name in update)
        assert not any(name.endswith(".1") for name in update)


@pytest.mark.parametrize(
    ("wanted", "directory"),
    [
        (stages.REFERENCE, "ref_compute_log_prob"),
        (stages.LOG_PROB, "old_log_prob"),
        (stages.ACTOR_UPDATE, "actor_train"),
    ],
)
def test_each_stage_alone(tmp_path: Path, session: Any, wanted: str, directory: str) -> None:
    session(stages=(wanted,), key_data=False)
    train_actor(Actor(), 0, data())
    assert [path.name for path in (tmp_path / "dump").iterdir()] == [directory]


def test_a_teacher_is_told_by_its_prefix(tmp_path: Path, session: Any) -> None:
    session()
    actor = Actor()
    running.begin(running.Running(actor, "actor", 0, data()))
    log_prob = method(workers.around_compute_log_prob, Actor.compute_log_prob)
    log_prob(actor, actor.iterator(data()), store_prefix="teacher_")
    assert lines(tmp_path, "captured", "teacher")[0]["stage"] == stages.TEACHER
    running.end()


def test_steps_count_from_the_runs_first_rollout(tmp_path: Path, session: Any) -> None:
    session()
    actor = Actor()
    for rollout_id in (40, 41):
        train_actor(actor, rollout_id, data())
    assert [line["step"] for line in lines(tmp_path, "captured", "ref")] == [0, 1]
    assert [line["trainer_step"] for line in lines(tmp_path, "captured", "ref")] == [40, 41]


def test_every_process_counts_from_the_managers_first_rollout(tmp_path: Path, session: Any) -> None:
    """With critic-only rollouts first, the policy's first rollout is not the run's."""
    session()
    control.announce_first(7)
    control._first = None  # what another process starts with
    train_actor(Actor(), 9, data())
    assert lines(tmp_path, "captured", "actor")[0]["step"] == 2


class Seen(Actor):
    """Remembers the weights that each stage of a rollout began with."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.Adam(self.model[0].parameters(), lr=0.1)
        self.began: dict[str, torch.Tensor] = {}

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().clone() for p in self.model[0].parameters()])

    def compute_log_prob(self, data_iterator: Any, store_prefix: str = "") -> Any:
        self.began[store_prefix] = self.weights()
        return super().compute_log_prob(data_iterator, store_prefix)


@pytest.mark.parametrize("runs_old", [True, False])
def test_a_later_step_begins_from_the_benchmarks_state(
    tmp_path: Path, session: Any, runs_old: bool
) -> None:
    """Once the policy is in place: the reference, which is put there first, stays as it is."""
    begun = session()
    control.reset(dataclasses.replace(begun, keep_states=True), resolved=True)
    one, other = Seen(), Seen()
    for actor in (one, other):
        actor.args.runs_old = runs_old
    train_actor(one, 0, data())
    start = one.weights()
    train_actor(one, 1, data())
    workers._joining = None
    joined = dataclasses.replace(begun, join_states=f"{begun.side}/states", role="target")
    control.reset(joined, resolved=True)
    for parameter in other.model[0].parameters():
        parameter.data *= 1.5
    train_actor(other, 0, data())
    own = other.weights()
    train_actor(other, 1, data())
    assert torch.equal(other.began["ref_"], own) and not torch.equal(own, start)
    assert not runs_old or torch.equal(other.began[""], start)
    assert torch.equal(other.weights(), one.weights())
    assert [line["step"] for line in lines(tmp_path, "joined", "actor")] == [1]


def test_a_skipped_old_log_prob_is_said_with_what_to_set(
    session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session()
    train_actor(Actor(runs_old=False), 0, data())
    message = capsys.readouterr().err
    assert "slime did not run old_log_prob" in message
    assert "--keep-old-actor" in message


def test_it_is_not_said_of_a_run_that_has_it(
    session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    session()
    train_actor(Actor(), 0, data())
    assert "old_log_prob" not in capsys.readouterr().err


def test_losses_gradients_and_changes_of_the_update(tmp_path: Path, session: Any) -> None:
    session()
    train_actor(Actor(), 0, data())
    names = records(tmp_path, "actor_train", file="debug")
    assert {"loss.loss.0.debug", "loss.pg_loss.0.debug", "loss.clip.0.debug"} <= set(names)
    assert "head.weight.grad_reduced.0.debug" in names
    assert "first.bias.change.0.debug" in names


def test_the_model_and_the_optimizer_are_left_as_they_were(session: Any) -> None:
    session()
    actor = Actor()
    before = dict(vars(actor.optimizer))
    train_actor(actor, 0, data())
    assert vars(actor.optimizer).keys() == before.keys()
    for module in actor.model[0].modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_capture_changes_no_number(tmp_path: Path, session: Any) -> None:
    control.reset(None, resolved=True)
    plain = Actor()
    train_actor(plain, 0, data())
    session()
    captured = Actor()
    train_actor(captured, 0, data())
    for ours, theirs in zip(
        captured.model[0].parameters(), plain.model[0].parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_every_stage_proves_which_samples_it_worked_on(tmp_path: Path, session: Any) -> None:
    session()
    train_actor(Actor(), 0, data())
    proofs = lines(tmp_path, "samples", "ref") + lines(tmp_path, "samples", "actor")
    assert {line["stage"] for line in proofs} == {
        stages.REFERENCE,
        stages.LOG_PROB,
        stages.ACTOR_UPDATE,
    }
    assert all(line["samples"] == proofs[0]["samples"] for line in proofs)
    assert len(set(proofs[0]["samples"])) == 2


def array(tmp_path: Path, name: str, micro_step: int) -> list[float]:
    place = tmp_path / "dump" / "data" / name / "step0" / "rank0" / f"micro_step{micro_step}"
    return np.load(place / f"{name}.npy", allow_pickle=False).tolist()


def test_key_data_by_micro_batch(tmp_path: Path, session: Any) -> None:
    session()
    train_actor(Actor(), 0, data())
    # the schedule trains on sample 1 first
    assert array(tmp_path, "input_ids", 0) == [5, 9]
    assert array(tmp_path, "prompts", 1) == [5, 6]
    assert array(tmp_path, "responses", 1) == [7, 8]
    assert array(tmp_path, "loss_mask", 1) == [1, 0]
    assert array(tmp_path, "old_log_probs", 0) == [-2.0, -2.0]
    assert array(tmp_path, "ref_log_probs", 1) == [-1.0, -1.0]
    assert array(tmp_path, "rewards", 1) == [1.0]


def test_key_data_of_a_fixed_micro_batch_size(tmp_path: Path, session: Any) -> None:
    """v0.2.2 has no schedule; rows of unequal length lie end to end."""
    session()
    actor = Actor()
    actor.schedule = None
    train_actor(actor, 0, data())
    assert array(tmp_path, "input_ids", 0) == [5, 6, 7, 8, 5, 9]
    place = tmp_path / "dump/data/input_ids/step0/rank0/micro_step0/input_ids.json"
    assert json.loads(place.read_text())["data"]["offsets"] == [0, 4, 6]


def test_a_critic_writes_values_and_nothing_of_the_actors(tmp_path: Path, session: Any) -> None:
    """Both are rank 0 of their own processes."""
    session()
    train_critic(Actor("critic"), 0, data())
    assert [path.name for path in (tmp_path / "dump" / "data").iterdir()] == ["values"]


def test_slimes_gathered_dump_is_the_source_where_it_exists(
    tmp_path: Path, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the other ranks' samples, and the log-probs of the training forward."""
    session()
    monkeypatch.setitem(sys.modules, "slime.observability.train_data_utils", types.ModuleType("x"))
    template = str(tmp_path / "train_{rollout_id}_{rank}.pt")
    samples = [
        {
            "rollout_position": position,
            "data_parallel_rank": position % 2,
            "tokens": torch.tensor([1, position]),
            "response_lengths": 1,
            "log_probs": torch.tensor([-float(position)]),
        }
        for position in range(4)
    ]
    shards = [
        {
            "rank": rank * 4,
            "data_parallel_rank": rank,
            "partition": [rank + 2, rank],
            "micro_batch_indices": [[0], [1]],
        }
        for rank in range(2)
    ]
    torch.save(
        {"format_version": 2, "samples": samples, "dp_shards": shards},
        template.format(rollout_id=0, rank=0),
    )
    train_actor(Actor(runs_old=False, save_debug_train_data=template), 0, data())
    root = tmp_path / "dump" / "data" / "old_log_probs" / "step0"
    assert {path.name for path in root.iterdir()} == {"rank0", "rank4"}
    second = np.load(root / "rank4" / "micro_step0" / "old_log_probs.npy", allow_pickle=False)
    assert second.tolist() == [-3.0]


def test_metrics_by_step(tmp_path: Path, session: Any) -> None:
    session()
    control.announce_first(5)
    metrics.enter(6)
    sent = []
    for loss in (0.5, 0.25):
        values = {"train/loss": torch.tensor(loss), "train/text": "x", "train/step": 1}
        metrics.log(lambda *args, **kwargs: sent.append(args), ("args", values, "train/step"), {})
    assert len(sent) == 2, "slime's own tracking goes on"
    found = [json.loads(x) for x in (tmp_path / "side/metrics.jsonl").read_text().splitlines()]
    assert found == [
        {"step": 1, "trainer_step": 6, "metrics": {"train/loss": 0.5}},
        {"step": 1, "trainer_step": 6, "metrics": {"train/loss@1": 0.25}},
    ]


class SlimesActor:
    def init(self, args: Any, role: str, with_ref: bool = False) -> Any:
        return args, role, with_ref


class PassingOn(SlimesActor):
    def init(self, *args: Any, **kwargs: Any) -> Any:
        return super().init(*args, **kwargs)


class PassingOnAgain(PassingOn):
    def init(self, *a: Any, **k: Any) -> Any:
        return super().init(*a, **k)


class InAnotherOrder(SlimesActor):
    def init(self, role: str, args: Any, with_ref: bool = False) -> Any:  # type: ignore[override]
        return super().init(args, role, with_ref)


@pytest.mark.parametrize("cls", [SlimesActor, PassingOn, PassingOnAgain])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [(("A", "actor"), {}), (("A",), {"role": "actor"}), ((), {"role": "actor", "args": "A"})],
)
def test_an_actor_of_ones_own_may_pass_everything_on(
    cls: type[SlimesActor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    for name, value in (("args", "A"), ("role", "actor"), ("with_ref", False)):
        assert running.argument(cls.init, name, (cls(), *args), kwargs) == value


def test_its_own_words_come_before_those_of_what_it_overrides() -> None:
    given = (InAnotherOrder(), "critic", "A")
    assert running.argument(InAnotherOrder.init, "args", given, {}) == "A"
    assert running.argument(InAnotherOrder.init, "role", given, {}) == "critic"


def test_an_argument_that_nothing_names_is_said() -> None:
    class Alone:
        def init(self, *a: Any, **k: Any) -> None: ...

    with pytest.raises(HookError, match=r"Alone.init .* what its 'role' is"):
        running.argument(Alone.init, "role", (Alone(), 1, 2), {})
    with pytest.raises(HookError, match=r"missing a required argument: 'role'"):
        running.argument(SlimesActor.init, "role", (SlimesActor(), 1), {})


def test_such_an_actor_trains_under_the_hooks(tmp_path: Path, session: Any) -> None:
    """Its ``init`` is wrapped as a subclass's, and calls slime's, which is wrapped as well."""
    from rlprobe.frameworks.wrap import wrap_family

    class Slimes(SlimesActor):
        pass

    class Base(Slimes):
        def init(self, args: Any, role: str, with_ref: bool = False) -> Any:
            return "made"

    session()
    wrap_family(Base, {"init": workers.around_init}, framework="slime")

    class Own(Base):
        def init(self, *args: Any, **kwargs: Any) -> Any:
            return super().init(*args, **kwargs)

    assert Own().init(types.SimpleNamespace(bf16=False, fp16=False), role="critic") == "made"
