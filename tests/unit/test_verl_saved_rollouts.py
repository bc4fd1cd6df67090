"""Are the rollouts that verl saves itself replayed as they were, and only for their own prompts?"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
verl = pytest.importorskip("verl")

from tensordict import TensorDict  # noqa: E402

from rlprobe import frameworks, stages  # noqa: E402
from rlprobe.capture.session import ReplayOptions  # noqa: E402
from rlprobe.config import Alignment  # noqa: E402
from rlprobe.errors import ConfigError, ReplayError  # noqa: E402
from rlprobe.frameworks import RunDirectories  # noqa: E402
from rlprobe.frameworks.verl.replay import generation, rollouts  # noqa: E402
from rlprobe.rollouts import hdf5  # noqa: E402
from rlprobe.runs import bindings  # noqa: E402
from rlprobe.runs.launch import session_of  # noqa: E402
from rlprobe.runs.plan import plan  # noqa: E402

QUESTIONS = ["1+1?", "1+1?", "2+2?"]


def asked(questions: list[str]) -> Any:
    raw = np.empty(len(questions), dtype=object)
    raw[:] = [[{"role": "user", "content": q}] for q in questions]
    return raw


def output(**changes: Any) -> Any:
    """What verl's generation returns; its tensors padded, left and right."""
    rows = len(QUESTIONS)
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(rows, 7, dtype=torch.long)
    mask[:, 0] = mask[0, -1] = 0
    tensors = {
        "prompts": torch.randint(1, 99, (rows, 4), generator=generator),
        "responses": torch.randint(1, 99, (rows, 3), generator=generator),
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1),
        "response_mask": mask[:, 4:].clone(),
        "rollout_log_probs": torch.randn(rows, 3, generator=generator),
        "rm_scores": torch.tensor([[0.0, 1.0, 0.0]] * rows),
        "low": torch.randn(rows, 2, generator=generator).bfloat16(),
    }
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=1)
    tensors |= {k: v for k, v in changes.items() if v is not None}
    kept = {k: v for k, v in tensors.items() if k not in changes or changes[k] is not None}
    return verl.DataProto(
        batch=TensorDict(kept, batch_size=rows),
        non_tensor_batch={
            "raw_prompt": asked(QUESTIONS),
            "__num_turns__": np.arange(2, 2 + rows, dtype=np.int32),
            "images": np.array([object() for _ in range(rows)], dtype=object),
        },
        meta_info={"timing": {"s": 1.0}},
    )


def saved(root: Path, found: Any, step: int = 1) -> Path:
    """As verl's RolloutSkip lays it out."""
    directory = root / "experiment/gbs3_n1" / str(step)
    directory.mkdir(parents=True)
    if isinstance(found, bytes):
        (directory / "gen_batch.dp").write_bytes(found)
    else:
        found.save_to_disk(directory / "gen_batch.dp")
    (directory / "meta.json").write_text(json.dumps({"global_steps": step}))
    return root


def load(root: Path, step: int = 0) -> Any:
    return generation.load_step(ReplayOptions(path=str(root)), step)


def test_a_step_comes_back_tensor_by_tensor(tmp_path: Path) -> None:
    told = output()
    recorded, source = load(saved(tmp_path, told))
    assert "verl's step 1" in source and recorded.samples[0].reward == 1.0
    prompts = verl.DataProto(
        batch=TensorDict({"dummy": torch.zeros(3, 1)}, batch_size=3),
        non_tensor_batch={"raw_prompt": asked(QUESTIONS)},
    )
    back = rollouts.to_batch(recorded, prompts, source)
    assert set(back.batch.keys()) == set(told.batch.keys())
    for name, tensor in told.batch.items():
        assert back.batch[name].dtype == tensor.dtype and torch.equal(back.batch[name], tensor)
    assert back.non_tensor_batch["__num_turns__"].dtype == np.int32
    # an object that is no data is left out, and said to be
    assert recorded.meta["not_recorded"] == ["images"] and "images" not in recorded.values
    first = recorded.samples[0]
    assert first.sample_digest != recorded.samples[1].sample_digest


def test_other_prompts_are_refused_by_their_messages(tmp_path: Path) -> None:
    recorded, source = load(saved(tmp_path, output()))
    prompts = verl.DataProto(
        batch=TensorDict({"dummy": torch.zeros(3, 1)}, batch_size=3),
        non_tensor_batch={"raw_prompt": asked(["1+1?", "3+3?", "2+2?"])},
    )
    with pytest.raises(ReplayError, match=r"1 of 3 rows differ \(rows 1\)"):
        rollouts.to_batch(recorded, prompts, source)


def test_steps_are_the_trainers_from_1(tmp_path: Path) -> None:
    saved(saved(tmp_path, output()), output(), step=2)
    assert load(tmp_path, 1)[0].trainer_step == 2
    with pytest.raises(ReplayError, match="step 2"):
        load(tmp_path, 2)


class Nasty:
    def __reduce__(self) -> Any:
        return (print, ("loaded",))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (pickle.dumps(Nasty()), "no DataProto of verl"),
        (pickle.dumps({"prompts": [1]}), "no DataProto of verl"),
        (b"\x80\x05nonsense", "is not read"),
        (b"", "is not read"),
    ],
)
def test_what_is_no_batch_is_refused_and_never_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], found: bytes, said: str
) -> None:
    with pytest.raises(ReplayError, match=said):
        load(saved(tmp_path, found))
    assert "loaded" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"responses": None}, "has no responses"),
        ({"attention_mask": torch.ones(3, 5)}, "are not as wide as prompts and responses"),
        ({"responses": torch.rand(3, 3)}, "responses holds float32, no token ids"),
    ],
)
def test_a_batch_that_no_trainer_could_go_on_with_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ReplayError, match=said):
        load(saved(tmp_path, output(**changes)))


def test_texts_alone_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"input": "1+1?", "output": "2", "score": 1}\n')
    with pytest.raises(ReplayError, match=r"rollout_data_dir, which cannot be .*skip.rollout"):
        load(tmp_path)


def specs(root: Path, **changes: Any) -> Any:
    raw: dict[str, Any] = {
        "name": "t", "framework": "verl", "framework_version": "0.9.1",
        "model": {"path": "builtin:tiny-qwen2", "critic_path": "builtin:tiny-qwen2-critic"},
        "data": {"train_files": "builtin:arithmetic"},
        "overrides": ["algorithm.adv_estimator=gae"],
        "benchmark": {"rollouts": str(root)}, **changes,
    }  # fmt: skip
    return plan(Alignment.model_validate_json(json.dumps(raw)), {})


def test_a_benchmark_of_saved_rollouts_generates_nothing_and_is_replayed(tmp_path: Path) -> None:
    root = saved(tmp_path / "saved", output())
    found = specs(root)
    benchmark = found["benchmark"]
    assert stages.GENERATE not in benchmark.stages
    command = frameworks.get("verl").command(benchmark, RunDirectories(tmp_path, tmp_path))
    assert "actor_rollout_ref.rollout.name=rlprobe_replay" in command
    told = session_of(benchmark, tmp_path, tmp_path)
    assert told.replay is not None and told.replay.path == str(root) and told.collect_rollouts
    assert str(root) in list(bindings.paths(benchmark))
    target = session_of(found["target"], tmp_path, tmp_path)
    assert target.replay is not None and benchmark.key in target.replay.path
    # what they are is part of what the run is
    saved(root, output(), step=2)
    assert specs(root)["benchmark"].key != benchmark.key
    assert "rollouts" not in specs(root, benchmark={})["benchmark"].declared()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"benchmark": {"rollouts": "nowhere"}}, "benchmark.rollouts: .*nowhere does not exist"),
        ({"benchmark": {"rollouts": "x", "run": "0" * 64}}, "accepted: one of the two"),
    ],
)
def test_what_is_not_there_is_said_before_anything_runs(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        specs(tmp_path, **changes)


def test_an_empty_directory_holds_no_rollouts(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is no directory with files; accepted"):
        specs(tmp_path / "empty")


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"1.jsonl": b'{"input": "1+1?", "output": "2", "score": 1}\n'}, "skip.rollout"),
        ({"1/0/tq_batch.pt": b"x"}, "rows without an order"),
        ({"notes.txt": b"x", "logs/a.log": b"x"}, "holds no rollouts; accepted: what verl's"),
    ],
)
def test_what_cannot_be_replayed_is_refused_before_anything_runs(
    tmp_path: Path, left: dict[str, bytes], said: str
) -> None:
    for name, content in left.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^benchmark.rollouts: .*{said}"):
        specs(tmp_path)


def test_what_a_run_recorded_is_accepted_in_each_of_its_places(tmp_path: Path) -> None:
    recorded, _ = load(saved(tmp_path / "saved", output()))
    for place in ("plain", "run/rollouts"):
        hdf5.write(tmp_path / place / "step0.h5", recorded)
    (tmp_path / "dump/data/responses").mkdir(parents=True)
    (tmp_path / "dump/data/responses/x.npy").touch()
    for place in ("plain", "run", "dump"):
        assert specs(tmp_path / place)["benchmark"].rollouts == str(tmp_path / place)
