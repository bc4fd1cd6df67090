"""Are recorded rollouts put into the newer trainer's queue as its agent loop would put them?"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from omegaconf import OmegaConf  # noqa: E402
from tensordict import NonTensorData, NonTensorStack, TensorDict  # noqa: E402

from rlprobe.errors import ReplayError  # noqa: E402
from rlprobe.frameworks.verl.replay import queue_replay, rollouts, transfer  # noqa: E402
from rlprobe.rollouts import Ragged, Rollouts, Sample, prompt_identity, vendor  # noqa: E402

CONFIG = OmegaConf.create(
    {
        "trainer": {"v1": {"trainer_mode": "sync"}},
        "data": {},
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 2, "prompt_length": 8}},
    }
)


class Queue:
    """Stands in for TransferQueue's module."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None):
        assert partition_id == "train"
        for row, key in enumerate(keys):
            self.tags.setdefault(key, {}).update(tags[row])
            if fields is not None:
                assert "finished" not in [t["status"] for t in self.tags.values()]
                self.rows[key] = {
                    name: value.unbind(0)[row]
                    if isinstance(value, torch.Tensor)
                    else transfer.column(value, len(keys))[row]
                    for name, value in ((n, fields.get(n)) for n in fields.keys())  # noqa: SIM118
                }


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    module = types.ModuleType("transfer_queue")
    module.kv_batch_put = made.kv_batch_put  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transfer_queue", module)
    return made


def message(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def asked(*questions: str) -> TensorDict:
    """What the trainer submits."""
    return TensorDict(
        {
            "dummy_tensor": torch.zeros(len(questions), 1),
            "raw_prompt": NonTensorStack(*[message(q) for q in questions]),
            "data_source": NonTensorStack(*["sums" for _ in questions]),
            "uid": NonTensorStack(*[f"new{i}" for i in range(len(questions))]),
            "global_steps": NonTensorData(3),
        },
        batch_size=len(questions),
    )


def manager(workers: Any = None, config: Any = CONFIG) -> Any:
    return types.SimpleNamespace(config=config, reward_loop_worker_handles=workers)


def sample(row: int, question: str, prompt: list[int], response: list[int]) -> Sample:
    identity = prompt_identity({"raw_prompt": message(question), "data_source": "sums"})
    return Sample.build(f"s{row}", identity, prompt, response)


QUESTIONS = ("1+1?", "1+1?", "2+2?", "2+2?")
PROMPTS = [[5, 6], [5, 6], [7], [7]]
RESPONSES = [[11], [12, 13], [14, 15], [16]]


def ragged() -> Rollouts:
    """As the newer trainer records."""
    found = Rollouts(step=0, trainer_step=1)
    found.tensors = {
        "prompts": Ragged.from_rows([np.array(p) for p in PROMPTS]),
        "responses": Ragged.from_rows([np.array(r) for r in RESPONSES]),
        "response_mask": Ragged.from_rows([np.ones(len(r), dtype=np.int64) for r in RESPONSES]),
        "rollout_log_probs": Ragged.from_rows([-np.array(r, np.float32) for r in RESPONSES]),
        "rm_scores": Ragged.from_rows(
            [np.eye(1, len(r), len(r) - 1, dtype=np.float32)[0] for r in RESPONSES]
        ),
    }
    found.samples = [
        sample(row, *of) for row, of in enumerate(zip(QUESTIONS, PROMPTS, RESPONSES, strict=True))
    ]
    found.values["num_turns"] = [2, 4, 2, 2]
    return found


def padded() -> Rollouts:
    """The same as the older trainer records it."""
    found = ragged()

    def right(name: str) -> np.ndarray:
        rows = found.tensors[name]
        assert isinstance(rows, Ragged)
        width = 3
        return np.stack([np.pad(rows.row(i), (0, width - len(rows.row(i)))) for i in range(4)])

    prompts = np.array([[0, *p] if len(p) == 2 else [0, 0, *p] for p in PROMPTS])
    tensors = {name: right(name) for name in found.tensors if name != "prompts"}
    mask = np.array(
        [[0] * (3 - len(p)) + [1] * len(p) + [1] * len(r) + [0] * (3 - len(r))
         for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    )  # fmt: skip
    found.tensors = {**tensors, "prompts": prompts, "attention_mask": mask}
    found.values = {"__num_turns__": [2, 4, 2, 2], "acc": [1.0, 0.0, 1.0, 1.0]}
    found.meta = {"meta_info": {"reward_extra_keys": ["acc"]}}
    return found


@pytest.mark.parametrize("form", [ragged, padded])
def test_rows_are_those_of_the_agent_loop(queue: Queue, form: Any) -> None:
    queue_replay.put(form(), asked("2+2?", "1+1?"), "FILE", manager(), False)
    assert sorted(queue.rows) == ["new0_0_0", "new0_1_0", "new1_0_0", "new1_1_0"]
    row = queue.rows["new1_1_0"]
    assert row["prompts"].tolist() == [5, 6]
    assert row["responses"].tolist() == [12, 13]
    assert row["input_ids"].tolist() == [5, 6, 12, 13]
    assert row["position_ids"].tolist() == [0, 1, 2, 3]
    assert row["response_mask"].tolist() == row["loss_mask"].tolist() == [1, 1]
    assert row["rollout_log_probs"].tolist() == [-12.0, -13.0]
    assert row["rm_scores"].tolist() == [0.0, 1.0]
    assert (row["num_turns"], row["session_id"], row["uid"]) == (4, 1, "new1")
    assert row["raw_prompt"] == message("1+1?")
    assert queue.tags["new1_1_0"] == {
        "status": "success",
        "prompt_len": 2,
        "response_len": 2,
        "seq_len": 4,
        "global_steps": 3,
        "min_global_steps": 2,
        "max_global_steps": 2,
    }
    finished = {"is_prompt": True, "status": "finished", "global_steps": 3}
    assert queue.tags["new0"] == queue.tags["new1"] == finished


def test_what_the_reward_said_besides_comes_back(queue: Queue) -> None:
    queue_replay.put(padded(), asked("2+2?", "1+1?"), "FILE", manager(), False)
    assert queue.rows["new1_1_0"]["extra_fields"]["reward_extra_info"] == {"acc": 0.0}


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (asked("1+1?"), "FILE holds 4 samples, but this step asks for 2"),
        (asked("1+1?", "3+3?"), r"1 of 2 rows differ \(rows 1\)"),
    ],
)
def test_what_was_not_recorded_is_refused(queue: Queue, prompts: Any, said: str) -> None:
    with pytest.raises(ReplayError, match=said):
        queue_replay.put(ragged(), prompts, "FILE", manager(), False)
    assert not queue.tags


def test_a_trainer_that_runs_ahead_is_refused(queue: Queue) -> None:
    config = OmegaConf.merge(CONFIG, {"trainer": {"v1": {"trainer_mode": "colocate_async"}}})
    with pytest.raises(ReplayError, match=r"'colocate_async'.*'sync' only"):
        queue_replay.put(ragged(), asked("1+1?", "2+2?"), "FILE", manager(config=config), False)


def test_images_are_refused(queue: Queue) -> None:
    prompts = asked("1+1?", "2+2?")
    seen = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    prompts["raw_prompt"] = NonTensorStack(seen, message("2+2?"))
    with pytest.raises(ReplayError, match="images"):
        queue_replay.put(ragged(), prompts, "FILE", manager(), False)


def test_a_vendors_dump_is_matched_by_tokens(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {"1+1?": [5, 6], "2+2?": [7]}
    tokenizer = types.SimpleNamespace(
        apply_chat_template=lambda messages, **_: ids[messages[0]["content"]]
    )
    monkeypatch.setattr(rollouts, "tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(rollouts, "scores", lambda workers, batches: [7.0] * len(batches))
    found = padded()
    found.meta, found.values = {"source": vendor.SOURCE}, {}
    for name in ("rm_scores", "rollout_log_probs", "response_mask"):
        del found.tensors[name]
    found.samples = [
        Sample.build(f"s{row}", "", prompt, response)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]
    queue_replay.put(found, asked("2+2?", "1+1?"), "FILE", manager(["worker"]), False)
    row = queue.rows["new1_1_0"]
    assert row["responses"].tolist() == [12, 13]
    assert row["rm_scores"].tolist() == [0.0, 7.0], "a dump has no rewards: they are computed"


def test_answers_are_kept_by_prompt_and_not_by_random_id() -> None:
    """A prompt drawn twice: its two groups are told apart by what was answered."""
    keys = ["b_0_0", "a_1_0", "b_1_0", "a_0_0"]
    responses = [[3], [9], [4], [1]]
    order = transfer._order(keys, ["same"] * 4, responses)
    assert [keys[row] for row in order] == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    renamed = [{"a": "y", "b": "x"}[key[0]] + key[1:] for key in keys]
    assert transfer._order(renamed, ["same"] * 4, responses) == order
