"""``rlprobe rollouts show FILE``: what a step's rollouts hold, one line a sample."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from rlprobe.cli.common import given_path, write_json
from rlprobe.rollouts import Ragged, Rollouts, Sample, hdf5, responses
from rlprobe.terminal import counted


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("rollouts", help="look into recorded rollouts")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="verify a step{N}.h5 file and list its samples")
    show.add_argument("file", type=given_path, metavar="FILE")


def run(args: argparse.Namespace) -> int:
    rollouts = hdf5.read(args.file)
    if args.json is not None:
        write_json(args.json, describe(rollouts))
    print(
        f"step {rollouts.step} (trainer's {rollouts.trainer_step}), "
        f"{counted(len(rollouts), 'sample')}, "
        f"tensors: {', '.join(rollouts.tensors) or 'none'}"
    )
    settings = ", ".join(f"{key} {value}" for key, value in sorted(rollouts.sampling.items()))
    print(f"sampling: {settings or 'not recorded'}")
    print(f"responses: {_odd(responses.look(rollouts))}")
    for sample in rollouts.samples:
        reward = "-" if sample.reward is None else f"{sample.reward:g}"
        print(
            f"{sample.id}  {sample.sample_digest[:19]}  reward {reward}  "
            f"{_short(sample.prompt_text)} -> {_short(sample.response_text)}"
        )
    return 0


def _odd(found: responses.Responses | None) -> str:
    """What is odd about the responses, in words."""
    if found is None:
        return "their tokens were not recorded"
    said = [
        f"{words} {len(ids)} of {found.count}" if ids is not None else f"{words} not known"
        for words, ids in (
            ("looping", found.looping),
            ("garbled", found.garbled),
            ("empty", found.empty),
            ("as long as they may be", found.cut),
        )
    ]
    return ", ".join(said)


def describe(rollouts: Rollouts) -> dict[str, Any]:
    """The listing as plain data: samples in full, tensors by type and shape."""
    tensors = {}
    for name, tensor in rollouts.tensors.items():
        ragged = isinstance(tensor, Ragged)
        values = tensor.values if isinstance(tensor, Ragged) else tensor
        tensors[name] = {
            "dtype": rollouts.dtypes.get(name, str(values.dtype)),
            "shape": list(values.shape),
            "ragged": ragged,
        }
    odd = responses.look(rollouts)
    return {
        "step": rollouts.step,
        "trainer_step": rollouts.trainer_step,
        "sampling": rollouts.sampling,
        "tensors": tensors,
        "columns": sorted(rollouts.values),
        "responses": None if odd is None else dataclasses.asdict(odd),
        "samples": [_sample(sample) for sample in rollouts.samples],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    shown = dataclasses.asdict(sample)
    if sample.reward is not None and not math.isfinite(sample.reward):
        shown["reward"] = str(sample.reward)  # strict JSON has no NaN
    return shown


def _short(text: str, width: int = 48) -> str:
    """Text on one line: hostile control characters must not reach the terminal."""
    shown = json.dumps(text, ensure_ascii=False)
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if len(shown) <= width else shown[: width - 2] + '…"'
