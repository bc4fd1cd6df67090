"""Micro-batches of one rank's samples."""

import torch
from megatron.core import parallel_state as mpu


class DataIterator:
    """One sample a micro-batch, in the order of the schedule."""

    def __init__(self, rollout_data, micro_batch_indices):
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys):
        rows = self.micro_batch_indices[self.offset]
        self.offset += 1
        columns = {key: self.rollout_data.get(key) for key in keys}
        return {k: None if v is None else [v[row] for row in rows] for k, v in columns.items()}

    def reset(self):
        self.offset = 0
        return self


def get_data_iterator(args, rollout_data):
    """The iterator, and the micro-batches of each train step."""
    count = len(rollout_data["response_lengths"])
    size = args.micro_batch_size
    schedule = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
    steps = max(count * mpu.get_data_parallel_world_size() // args.global_batch_size, 1)
    return [DataIterator(rollout_data, schedule)], [len(schedule) // steps] * steps


def get_batch(data_iterator, keys):
    batch = data_iterator.get_next(keys)
    longest = max(len(tokens) for tokens in batch["tokens"])
    padded = [torch.nn.functional.pad(t, (0, longest - len(t))) for t in batch["tokens"]]
    return {**batch, "input_ids": torch.stack(padded)}
