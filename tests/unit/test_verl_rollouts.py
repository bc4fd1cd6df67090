"""Do verl's batches come back from a recording as they were, and only for their own prompts?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
verl = pytest.importorskip("verl")

from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from rlprobe.capture.session import ReplayOptions  # noqa: E402
from rlprobe.errors import ReplayError  # noqa: E402
from rlprobe.frameworks.verl.replay import generation, rollouts  # noqa: E402
from rlprobe.rollouts import hdf5  # noqa: E402

CONFIG = OmegaConf.create(
    {"actor_rollout_ref": {"rollout": {"name": "rlprobe_cpu", "temperature": 0.7, "n": 2}}}
)


class _Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _prompts(questions: list[str]) -> Any:
    raw = np.empty(len(questions), dtype=object)
    raw[:] = [[{"role": "user", "content": q}] for q in questions]
    return verl.DataProto(
        batch=TensorDict({"dummy": torch.zeros(len(questions), 1)}, batch_size=len(questions)),
        non_tensor_batch={
            "raw_prompt": raw,
            "data_source": np.array(["sums"] * len(questions), dtype=object),
            "uid": np.array([f"u{i}" for i in range(len(questions))], dtype=object),
        },
    )


def _output(rows: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 99, (rows, 4), generator=generator)
    responses = torch.randint(1, 99, (rows, 3), generator=generator)
    mask = torch.ones(rows, 7, dtype=torch.long)
    mask[:, 0] = 0  # left padding
    mask[0, -1] = 0  # the first response is shorter
    scores = torch.zeros(rows, 3)
    scores[:, 1] = torch.arange(rows, dtype=torch.float32)
    extra = np.empty(rows, dtype=object)
    extra[:] = [{"k": i} for i in range(rows)]
    return verl.DataProto(
        batch=TensorDict(
            {
                "prompts": prompts,
                "responses": responses,
                "attention_mask": mask,
                "rm_scores": scores,
                "rollout_log_probs": torch.randn(rows, 3, generator=generator),
                "low": torch.randn(rows, 2, generator=generator).bfloat16(),
            },
            batch_size=rows,
        ),
        non_tensor_batch={
            "__num_turns__": np.arange(rows, dtype=np.int32),
            "extra": extra,
            "images": np.array([object() for _ in range(rows)], dtype=object),
        },
        meta_info={"reward_extra_keys": ["acc"], "timing": {"s": 1.0}},
    )


QUESTIONS = ["1+1?", "1+1?", "2+2?"]


def _recorded() -> Any:
    return rollouts.from_batch(
        _prompts(QUESTIONS),
        _output(3),
        step=0,
        trainer_step=1,
        config=CONFIG,
        tokenizer=_Tokenizer(),
    )


def test_what_was_recorded_is_what_comes_back(tmp_path: Path) -> None:
    hdf5.write(tmp_path / "step0.h5", _recorded())
    back = rollouts.to_batch(hdf5.read(tmp_path / "step0.h5"), _prompts(QUESTIONS), "file")
    original = _output(3)
    for name, value in original.batch.items():
        assert back.batch[name].dtype == value.dtype
        assert torch.equal(back.batch[name], value), name
    assert back.non_tensor_batch["extra"].tolist() == [{"k": 0}, {"k": 1}, {"k": 2}]
    assert back.non_tensor_batch["__num_turns__"].dtype == np.int32
    assert back.meta_info["reward_extra_keys"] == ["acc"]


def test_the_newer_trainers_rows_are_refused_on_the_older() -> None:
    recorded = _recorded()
    recorded.meta["source"] = rollouts.QUEUE
    with pytest.raises(ReplayError, match=r"set trainer\.use_v1=true"):
        rollouts.to_batch(recorded, _prompts(QUESTIONS), "file")


def test_what_has_no_json_form_is_named() -> None:
    assert _recorded().meta["not_recorded"] == ["images"]


def test_samples_know_their_text_reward_and_repetition() -> None:
    samples = _recorded().samples
    assert [sample.reward for sample in samples] == [0.0, 1.0, 2.0]
    assert len({sample.id for sample in samples}) == 3
    assert samples[0].prompt_identity == samples[1].prompt_identity != samples[2].prompt_identity
    assert len(samples[0].response_text.split()) == 2, "padding is no part of a response"
    assert len(samples[0].prompt_text.split()) == 3


def test_sampling_settings_are_recorded() -> None:
    sampling = _recorded().sampling
    assert sampling["temperature"] == 0.7
    assert (sampling["engine"], sampling["logprobs"]) == ("rlprobe_cpu", "processed")


def test_other_prompts_are_refused_with_their_rows() -> None:
    with pytest.raises(ReplayError, match=r"1 of 3 rows differ \(rows 1\)"):
        rollouts.to_batch(_recorded(), _prompts(["1+1?", "3+3?", "2+2?"]), "file")


def test_another_order_of_prompts_is_refused() -> None:
    with pytest.raises(ReplayError, match="rows 1, 2"):
        rollouts.to_batch(_recorded(), _prompts(["1+1?", "2+2?", "1+1?"]), "file")


def test_another_batch_size_is_refused() -> None:
    with pytest.raises(ReplayError, match="holds 3 samples, but this step asks for 2"):
        rollouts.to_batch(_recorded(), _prompts(QUESTIONS[:2]), "file")


def test_this_runs_own_ids_replace_the_recorded_ones() -> None:
    recorded = _recorded()
    recorded.values["uid"] = ["old"] * 3
    back = rollouts.to_batch(recorded, _prompts(QUESTIONS), "file")
    assert back.non_tensor_batch["uid"].tolist() == ["u0", "u1", "u2"]


def test_a_batch_whose_prompts_cannot_be_told_apart_is_refused() -> None:
    prompts = _prompts(QUESTIONS)
    for name in ("raw_prompt", "data_source"):
        del prompts.non_tensor_batch[name]
    with pytest.raises(ReplayError, match="return_raw_chat"):
        rollouts.identities(prompts)


def test_a_directory_without_rollouts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="no recorded rollouts"):
        generation.load_step(ReplayOptions(path=str(tmp_path)), 0)


def test_a_step_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    hdf5.write(tmp_path / "step0.h5", _recorded())
    with pytest.raises(ReplayError, match="step 4 was not recorded"):
        generation.load_step(ReplayOptions(path=str(tmp_path)), 4)


def test_recorded_steps_are_cycled_through(tmp_path: Path) -> None:
    hdf5.write(tmp_path / "step0.h5", _recorded())
    found, source = generation.load_step(ReplayOptions(path=str(tmp_path), seed=-1), 4)
    assert found.step == 0
    assert source.endswith("step0.h5")
