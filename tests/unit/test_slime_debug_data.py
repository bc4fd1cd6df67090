"""Do slime's debug rollout files become rollouts and files again, safely and without loss?"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlprobe.errors import ReplayError
from rlprobe.frameworks.slime import debug_data
from rlprobe.rollouts import hdf5, sample_digest


def sample(**more: Any) -> dict[str, Any]:
    """A sample as v0.3.1 saves it."""
    return {
        "group_index": 0,
        "index": 3,
        "prompt": "1 plus 2 is",
        "tokens": [11, 12, 13, 21, 22],
        "response": "three",
        "response_length": 2,
        "reward": 1.0,
        "loss_mask": None,
        "rollout_log_probs": [-0.5, -0.25],
        "teacher_log_probs": None,
        "rollout_routed_experts": None,
        "status": "completed",
        "metadata": {"turns": 1},
        **more,
    }


def save(path: Path, samples: list[Any], rollout_id: int = 7) -> Path:
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def recorded(samples: list[dict[str, Any]]) -> Any:
    return debug_data.to_rollouts(samples, step=0, trainer_step=7, sampling={"temperature": 1.0})


def through_files(tmp_path: Path, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """slime's file to ours, and ours to slime's."""
    number, read = debug_data.read(save(tmp_path / "7.pt", samples))
    assert number == 7
    hdf5.write(tmp_path / "step0.h5", recorded(read))
    debug_data.write(
        tmp_path / "again" / "7.pt", 7, debug_data.from_rollouts(hdf5.read(tmp_path / "step0.h5"))
    )
    return debug_data.read(tmp_path / "again" / "7.pt")[1]


def test_a_rollout_survives_the_way_through_both_files(tmp_path: Path) -> None:
    samples = [sample(), sample(index=4, tokens=[11, 12, 13, 9], response_length=1,
                                rollout_log_probs=[-2.0])]  # fmt: skip
    again = through_files(tmp_path, samples)
    kept = [{k: v for k, v in each.items() if v is not None} for each in samples]
    assert again == kept


def test_no_key_without_a_value_is_written(tmp_path: Path) -> None:
    """v0.2.2 takes the presence of teacher_log_probs for log-probs, and dies of its None."""
    again = through_files(tmp_path, [sample()])
    assert "teacher_log_probs" not in again[0]
    assert None not in again[0].values()


def test_multi_turn_samples_keep_masks_and_tokens(tmp_path: Path) -> None:
    """A tool's answer lies inside the response and is masked out of the loss."""
    turns = sample(
        prompt=[{"role": "user", "content": "go"}],
        tokens=list(range(20)),
        response_length=12,
        loss_mask=[1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        rollout_log_probs=[-0.1] * 12,
        metadata={"turns": 2, "tool_calls": ["search"]},
    )
    again = through_files(tmp_path, [turns, sample(index=9)])
    assert again[0]["loss_mask"] == turns["loss_mask"]
    assert again[0]["metadata"] == turns["metadata"]
    assert "loss_mask" not in again[1], "a sample without a mask keeps none"
    first = recorded([turns]).samples[0]
    assert first.sample_digest == sample_digest(range(8), range(8, 20))


def test_log_probs_keep_every_bit(tmp_path: Path) -> None:
    values = [-0.1, -1e-300]
    again = through_files(tmp_path, [sample(rollout_log_probs=values)])
    assert again[0]["rollout_log_probs"] == values


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_routed_experts_come_back_as_arrays(tmp_path: Path, kind: str) -> None:
    """v0.2.2 saves numpy arrays and reads them with torch.from_numpy; main saves tensors."""
    array = np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2)
    value: Any = array if kind == "array" else torch.from_numpy(array)
    again = through_files(tmp_path, [sample(rollout_routed_experts=value)])
    assert isinstance(again[0]["rollout_routed_experts"], np.ndarray)
    assert np.array_equal(again[0]["rollout_routed_experts"], array)


def test_samples_are_told_apart_by_prompt_and_repetition() -> None:
    made = recorded([sample(), sample(), sample(prompt="another")]).samples
    assert len({each.id for each in made}) == 3
    assert made[0].prompt_identity == made[1].prompt_identity != made[2].prompt_identity


class Call:
    """What a hostile file would run when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = save(tmp_path / "7.pt", [sample(metadata={"x": Call(mark)})])
    with pytest.raises(ReplayError, match="cannot be loaded safely"):
        debug_data.read(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "a full unpickler would have run it"


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    array = np.array([Call(tmp_path / "ran")], dtype=object)
    with pytest.raises(ReplayError):
        debug_data.read(save(tmp_path / "7.pt", [sample(metadata={"x": array})]))
    assert not (tmp_path / "ran").exists()


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    huge = torch.zeros(1, dtype=torch.int64).expand(1 << 40)
    with pytest.raises(ReplayError, match="claims"):
        debug_data.read(save(tmp_path / "7.pt", [sample(tokens=huge)]))


@pytest.mark.parametrize(
    "content",
    [b"", b"not a file of torch's", pickle.dumps({"samples": []})],
    ids=["empty", "garbage", "plain pickle"],
)
def test_what_is_no_debug_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "7.pt"
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=r"7\.pt"):
        debug_data.read(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "7.pt", [sample()])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ReplayError, match="not a readable"):
        debug_data.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="does not exist"):
        debug_data.read(tmp_path / "3.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [], "response_length": 0}, "0 tokens"),
        ({"response_length": 9}, "response of 9"),
        ({"loss_mask": [1]}, "loss_mask has 1 entry"),
        ({"rollout_log_probs": [0.0] * 3}, "rollout_log_probs has 3 entries"),
        ({"tokens": ["a"]}, "tokens"),
    ],
)
def test_contradictions_within_a_sample_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        recorded([sample(**change)])


@pytest.mark.parametrize("make", [np.float64, np.float32, np.float16, np.int64, np.bool_])
def test_numpy_scalars_are_numbers_wherever_they_stand(tmp_path: Path, make: Any) -> None:
    """A reward function that computes with numpy."""
    one = sample(reward=make(1), metadata={"score": make(1), "all": [make(0)]})
    one["tokens"] = [np.int32(token) for token in one["tokens"]]
    _, read = debug_data.read(save(tmp_path / "7.pt", [one]))
    made = recorded(read)
    assert made.samples[0].reward == 1.0
    assert made.values["metadata"] == [{"score": 1, "all": [0]}]
    assert made.samples[0].sample_digest == sample_digest([11, 12, 13], [21, 22])


@pytest.mark.parametrize(
    "reward", [torch.tensor(0.5), torch.tensor([0.5]), np.array(0.5), np.array([0.5]), np.str_("x")]
)
def test_a_reward_in_a_tensor_is_the_number_in_it(tmp_path: Path, reward: Any) -> None:
    _, read = debug_data.read(save(tmp_path / "7.pt", [sample(reward=reward)]))
    expected = None if isinstance(reward, np.str_) else 0.5
    assert recorded(read).samples[0].reward == expected


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list, tuple])
def test_tokens_may_come_in_any_array(tmp_path: Path, kind: Any) -> None:
    tokens = kind([11, 12, 13, 21, 22])
    _, read = debug_data.read(save(tmp_path / "7.pt", [sample(tokens=tokens)]))
    assert recorded(read).samples[0].sample_digest == sample_digest([11, 12, 13], [21, 22])


def test_log_probs_that_the_engine_could_not_give_are_nan_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = recorded([sample(rollout_log_probs=[None, -0.25]), sample(rollout_log_probs=[None] * 2)])
    assert np.isnan(made.tensors["rollout_log_probs"].row(0)).tolist() == [True, False]
    assert made.meta["missing_log_probs"] == {"rollout_log_probs": 3}
    assert "3 tokens of rollout_log_probs" in caplog.text


class Image:
    """An object of a class that is not loaded."""

    def __init__(self) -> None:
        self.pixels = [1, 2]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({0: "first turn"}, {"0": "first turn"}),
        ({"seen": {3, 1}}, {"seen": [1, 3]}),
        ({"x": b"raw"}, {"x": "<bytes>"}),
        ({"x": Image()}, {"x": f"<{__name__}.Image>"}),
    ],
)
def test_what_no_training_number_depends_on_is_kept_as_a_text_and_said(
    tmp_path: Path, value: Any, kept: Any, caplog: pytest.LogCaptureFixture
) -> None:
    _, read = debug_data.read(save(tmp_path / "7.pt", [sample(metadata=value)]))
    assert recorded(read).values["metadata"] == [kept]
    assert "kept as a text in metadata" in caplog.text


@pytest.mark.parametrize("key", ["reward", "tokens", "loss_mask", "rollout_log_probs"])
def test_an_object_that_training_depends_on_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    path = save(tmp_path / "7.pt", [sample(), sample(**{key: [Image()]})])
    with pytest.raises(ReplayError, match=rf"sample 1: {key} holds an object of .*Image"):
        debug_data.read(path)


def test_a_scalar_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    """numpy's own constructor would read beyond what the file holds."""

    class Short:
        def __reduce__(self) -> Any:
            return (np.float64(1).__reduce__()[0], (np.dtype("f8"), b"x"))

    with pytest.raises(ReplayError, match="has 1 bytes"):
        debug_data.read(save(tmp_path / "7.pt", [sample(metadata={"x": Short()})]))
