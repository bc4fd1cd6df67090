"""The rollout manager: prompts, toy responses, debug files, and the split over ranks."""

import json
import random
from pathlib import Path

import ray
import torch

from slime.utils import logging_utils
from slime.utils.types import Sample, Status
from slime.utils.version import is_old

VOCABULARY = 64


def tokenize(text):
    return [2 + byte % (VOCABULARY - 2) for byte in text.encode()]


class DataSource:
    """Prompts in order, several samples of each."""

    class Dataset:
        def __init__(self, path):
            lines = Path(path).read_text().splitlines()
            self.samples = self.origin_samples = [
                Sample(prompt=json.loads(x)["text"]) for x in lines
            ]

    def __init__(self, args):
        self.args = args
        self.dataset = self.Dataset(args.prompt_data)

    def groups(self, rollout_id):
        prompts = self.dataset.samples
        first = rollout_id * self.args.rollout_batch_size
        for group in range(first, first + self.args.rollout_batch_size):
            prompt = prompts[group % len(prompts)].prompt
            for _ in range(self.args.n_samples_per_prompt):
                yield group, prompt


@ray.remote
class RolloutManager:
    def __init__(self, args, pg):
        del pg
        self.args = args
        self.data_source = DataSource(args)

    def generate(self, rollout_id):
        samples = self._get_rollout_data(rollout_id=rollout_id)
        if self.args.save_debug_rollout_data is not None:
            path = Path(self.args.save_debug_rollout_data.format(rollout_id=rollout_id))
            path.parent.mkdir(parents=True, exist_ok=True)
            saved = {"rollout_id": rollout_id, "samples": [s.to_dict() for s in samples]}
            torch.save(saved, path)
        rewards = [sample.reward for sample in samples]
        logging_utils.log(
            self.args,
            {"rollout/raw_reward": sum(rewards) / len(rewards), "rollout/step": rollout_id},
            step_key="rollout/step",
        )
        return ray.put(self._convert_samples_to_train_data(samples))

    def _get_rollout_data(self, rollout_id):
        if self.args.load_debug_rollout_data:
            path = self.args.load_debug_rollout_data.format(rollout_id=rollout_id)
            loaded = torch.load(path, weights_only=False)["samples"]
            return [Sample.from_dict(sample) for sample in loaded]
        draw = random.Random(f"{self.args.rollout_seed} {rollout_id}")
        samples = []
        for index, (group, prompt) in enumerate(self.data_source.groups(rollout_id)):
            ids = tokenize(prompt)
            length = draw.randint(2, self.args.rollout_max_response_len)
            answer = [draw.randrange(2, VOCABULARY) for _ in range(length)]
            # the middle token stands for a tool's answer, which is not trained on
            mask = [0 if position == length // 2 else 1 for position in range(length)]
            samples.append(
                Sample(
                    group_index=group,
                    index=index,
                    prompt=prompt,
                    tokens=ids + answer,
                    response=" ".join(map(str, answer)),
                    response_length=length,
                    reward=float(sum(answer) % 5),
                    loss_mask=mask,
                    rollout_log_probs=[-draw.random() for _ in range(length)],
                    status=Status.COMPLETED,
                )
            )
        return samples

    def _convert_samples_to_train_data(self, samples):
        data = {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "total_lengths": [len(sample.tokens) for sample in samples],
            "loss_masks": [s.loss_mask or [1] * s.response_length for s in samples],
            "rewards": self._normalised([sample.reward for sample in samples]),
            "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
        }
        present = "teacher_log_probs" in samples[0].__dict__
        if present if is_old() else samples[0].teacher_log_probs is not None:
            data["teacher_log_probs"] = [list(sample.teacher_log_probs) for sample in samples]
        return data

    def _normalised(self, rewards):
        groups = torch.tensor(rewards).reshape(-1, self.args.n_samples_per_prompt)
        return (groups - groups.mean(dim=1, keepdim=True)).flatten().tolist()

    def dispose(self):
        return None
