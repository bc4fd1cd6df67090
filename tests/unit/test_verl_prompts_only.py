"""``PROMPTS_ONLY=1`` on verl: prompts as samples, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
verl = pytest.importorskip("verl")

from omegaconf import OmegaConf  # noqa: E402
from tensordict import TensorDict  # noqa: E402

from rlprobe import stages  # noqa: E402
from rlprobe.capture.session import ReplayOptions, Session  # noqa: E402
from rlprobe.errors import ConfigError  # noqa: E402
from rlprobe.frameworks.engines.forcing import Answer, Scores  # noqa: E402
from rlprobe.frameworks.verl.replay import prompts_only  # noqa: E402
from tests.unit.capture_helpers import session  # noqa: E402


def config(**rollout: Any) -> Any:
    settings = {"name": "rlprobe_cpu", "response_length": 16, **rollout}
    return OmegaConf.create(
        {"actor_rollout_ref": {"rollout": settings}, "trainer": {"use_v1": False}}
    )


def told(tmp_path: Path, **changes: Any) -> Session:
    found = session(tmp_path, stages=(stages.LOG_PROB,), key_data=True)
    return Session(**{**vars(found), "role": "collector", **changes})


def test_without_it_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTS_ONLY", raising=False)
    own, given = told(tmp_path), config()
    assert prompts_only.prepare(own, given) is own
    assert given.actor_rollout_ref.rollout.response_length == 16


def test_the_engine_is_asked_for_one_token_and_led_through_all_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMPTS_ONLY", "1")
    given = config()
    found = prompts_only.prepare(told(tmp_path), given)
    assert found is not None and given.actor_rollout_ref.rollout.response_length == 1
    assert found.capture.stages == (stages.LOG_PROB, stages.FORCED)
    assert (found.capture.forced_tokens, found.capture.forced_samples) == (0, None)
    assert stages.FORCED in found.expected_stages


@pytest.mark.parametrize(
    ("changes", "rollout", "said"),
    [
        ({"replay": ReplayOptions("/r")}, {}, "this run replays rollouts"),
        ({}, {"name": "sglang"}, "PROMPTS_ONLY=1: found .*=sglang.*accepted: rlprobe_cpu, vllm"),
    ],
)
def test_what_it_cannot_do_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any], rollout: dict[str, Any], said: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PROMPTS_ONLY", "1")
    with pytest.raises(ConfigError, match=f"{said}.*or unset it|{said}.*unset it"):
        prompts_only.prepare(told(tmp_path, **changes), config(**rollout))
    with pytest.raises(ConfigError, match="nothing is captured"):
        prompts_only.prepare(None, config())


def generated(prompts: list[list[int]]) -> Any:
    """Generation of one token, prompts padded on the left to 4."""
    rows = len(prompts)
    padded = torch.tensor([[0] * (4 - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (4 - len(row)) + [1] * len(row) + [1] for row in prompts])
    return verl.DataProto(
        batch=TensorDict(
            {
                "prompts": padded,
                "responses": torch.full((rows, 1), 99),
                "attention_mask": mask,
                "rm_scores": torch.tensor([[0.5 * n] for n in range(rows)]),
                "routed_experts": torch.zeros(rows, 5, 2),
            },
            batch_size=rows,
        ),
        non_tensor_batch={"uid": np.array([str(n) for n in range(rows)], dtype=object)},
        meta_info={"timing": {}},
    )


def test_a_prompts_first_token_is_answered_by_the_rest() -> None:
    output = generated([[5, 6, 7], [8, 9, 10, 11]])
    samples = prompts_only.alone(output, 0, 1)
    answers = {
        sample.sample_digest: Answer(
            Scores([-1.0 - number] * count, [0] * count, [0.0] * count), Scores([], [], [])
        )
        for number, (sample, count) in enumerate(zip(samples.samples, (2, 3), strict=True))
    }
    found = prompts_only.as_batch(output, samples, answers)
    batch = found.batch
    assert batch["prompts"].tolist() == [[5], [8]]
    assert batch["responses"].tolist() == [[6, 7, 0], [9, 10, 11]]
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 9, 10, 11]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 2], [0, 1, 2, 3]]
    assert batch["rollout_log_probs"].tolist() == [[-1, -1, 0], [-2, -2, -2]]
    assert batch["rm_scores"].tolist() == [[0, 0, 0], [0, 0, 0.5]]
    assert "routed_experts" not in batch.keys()  # noqa: SIM118  of the token that is dropped
    assert found.non_tensor_batch["uid"].tolist() == ["0", "1"]


def test_a_prompt_of_one_token_answers_nothing() -> None:
    with pytest.raises(ConfigError, match="the prompt of row 1 has 1 tokens"):
        prompts_only.alone(generated([[5, 6], [7]]), 0, 1)
