"""Rollouts in the files of frameworks: tensors and pickles, read without being loaded."""

from __future__ import annotations

import collections
import io
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlprobe.compare import sides
from rlprobe.dumps.rollouts import files, folder
from rlprobe.dumps.rollouts.plain import Array, DataProto, Rows, read_archive, read_pickle
from rlprobe.errors import DumpError, NotComparableError, RlprobeError
from tests.unit.compare_helpers import compared
from tests.unit.rollout_lines import differing, line, one, put

CASES = Path(__file__).parent / "cases/rollouts"


def folders(tmp: Path, name: str, place: str) -> Path:
    where = tmp / place
    where.parent.mkdir(parents=True)
    shutil.copyfile(CASES / name, where)
    return tmp


def fields(path: Path) -> dict[str, dict[str, Any]]:
    """Leaves of each sample by name, of the only step."""
    found = folder.find(path)
    assert found is not None
    (step,) = found.steps
    return {
        sample.response: {leaf.name: shown(leaf.value) for leaf in sample.leaves}
        for sample in found.read(step).samples
    }


def shown(value: Any) -> Any:
    return value.raw.tolist() if isinstance(value, Array) else getattr(value, "text", value)


@pytest.mark.parametrize("name", ["verl_0.9.1.dp", "verl_0.9.1_numpy.dp"])
def test_a_data_proto_is_read_without_being_loaded(tmp_path: Path, name: str) -> None:
    """Written by verl itself, with either way of keeping tensors."""
    path = folders(tmp_path, name, "run_proj/GBS2_N1_in3_out2/7/gen_batch.dp")
    found = folder.find(path)
    assert found is not None and found.kind is folder.SKIP and list(found.steps) == [7]
    first, second = fields(path).values()
    # padding is in neither, and the request's name is not compared
    assert first == {
        "prompts": "1 2", "responses": "7 8", "attention_mask": "1 1 1 1", "f": 0.5, "n": 1,
        "nums": 0.5, "reward_model.ground_truth": "4", "reward_model.style": "rule",
        "rollout_log_probs": [-0.5, -0.25], "st": "ab",
    }  # fmt: skip
    assert (second["responses"], second["rollout_log_probs"]) == ("9", [-1.0])
    assert (second["f"], second["reward_model.ground_truth"]) == (3, "5")


def test_both_ways_of_keeping_tensors_are_equal(tmp_path: Path) -> None:
    for side, name in (("b", "verl_0.9.1.dp"), ("t", "verl_0.9.1_numpy.dp")):
        folders(tmp_path / side, name, "1/gen_batch.dp")
    result = compared(tmp_path / "b", tmp_path / "t/1", tmp_path / "out")
    assert result.lack is None and differing(result) == {}
    assert result.summary["compared"] == result.summary["identical"] == 19


def test_a_batch_of_the_transfer_queue(tmp_path: Path) -> None:
    path = folders(tmp_path, "verl_0.9.1_tq.pt", "3/0/tq_batch.pt")
    first, second = fields(path).values()
    assert (first["prompts"], first["responses"]) == ("1 2", "7 8 9")
    assert (second["prompts"], second["responses"]) == ("3", "6")
    assert first["rm_scores"] == [0.0, 1.0] and second["rm_scores"] == [0.0, 0.5]
    assert (first["raw"], second["raw"]) == ("a", "b") and first["same"] == "x"
    assert (first["rm.ground_truth"], second["rm.ground_truth"]) == ("4", None)


def test_parts_of_one_step_are_joined_in_order(tmp_path: Path) -> None:
    for part in ("10", "2"):
        folders(tmp_path / part, "verl_0.9.1_tq.pt", "x")
        (tmp_path / f"3/{part}").mkdir(parents=True)
        shutil.move(tmp_path / part / "x", tmp_path / f"3/{part}/tq_batch.pt")
    found = folder.find(tmp_path)
    assert found is not None and [p.parent.name for p in found.steps[3]] == ["2", "10"]
    assert len(found.read(3).samples) == 4


def test_a_step_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    for batch in ("GBS2", "GBS4"):
        folders(tmp_path / batch, "verl_0.9.1.dp", "7/gen_batch.dp")
    with pytest.raises(DumpError, match=r"holds step 7 twice: .*GBS2.*GBS4.*name one"):
        sides.resolve(str(tmp_path))


@pytest.mark.parametrize("other", ["dump", "jsonl"])
def test_unlike_kinds_are_not_compared(tmp_path: Path, other: str) -> None:
    folders(tmp_path / "b", "verl_0.9.1.dp", "7/gen_batch.dp")
    if other == "jsonl":
        put(tmp_path / "t", [line(0)])
    else:
        place = tmp_path / "t/actor_generate_sequences/step0/rank0"
        place.mkdir(parents=True)
        (place / "dump.json").write_text('{"data": {}}')
    with pytest.raises(
        NotComparableError, match=r"holds verl's skip\.rollout, .*rollouts of one kind"
    ):
        compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")


def test_a_folder_of_two_kinds_is_refused(tmp_path: Path) -> None:
    put(tmp_path, [line(0)])
    folders(tmp_path / "skip", "verl_0.9.1.dp", "7/gen_batch.dp")
    with pytest.raises(DumpError, match=r"rollout_data_dir and of verl's skip.rollout"):
        sides.resolve(str(tmp_path))


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    trap = tmp_path / "trap"
    (tmp_path / "7/gen_batch.dp").write_bytes(pickle.dumps(Evil(str(trap))))
    found = folder.find(tmp_path)
    assert found is not None
    with pytest.raises(DumpError, match=r"holds an object of .*\.open, no DataProto"):
        found.read(7)
    assert not trap.exists()


def test_an_object_of_another_class_costs_its_field(tmp_path: Path) -> None:
    """Metadata of a class that is not there: the key is named, the others are compared."""
    batch = read_pickle(
        memoryview(pickle.dumps({"a": collections.deque([1]), "b": np.float32(0.5)}))
    )
    assert batch["b"] == 0.5 and batch["a"].name == "collections.deque"
    lines = [line(n) for n in range(3)]
    torch = pytest.importorskip("torch")
    for side in "bt":
        (tmp_path / side).mkdir()
        samples = [
            slime_sample(n, metadata={"when": collections.deque(), "n": n}) for n in range(3)
        ]
        torch.save({"rollout_id": 4, "samples": samples}, tmp_path / side / "4.pt")
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out", coverage=0.5)
    assert result.summary["counts"]["unreadable"] == len(lines) == 3
    row = result.records.filter(status="unreadable").row(0, named=True)
    assert "metadata.when: an object of collections.deque" in row["reason"]


# --------------------------------------------------------------------------------- slime


def slime_sample(number: int, **more: Any) -> dict[str, Any]:
    return {
        "index": number, "prompt": f"{number} plus 2 is", "tokens": [11, 12, 13, 21, 20 + number],
        "response": f"three {number}", "response_length": 2, "reward": 1.0, "loss_mask": None,
        "rollout_log_probs": [-0.5, -0.25], "status": "completed", "metadata": {}, **more,
    }  # fmt: skip


def test_slimes_debug_data_as_they_are(tmp_path: Path) -> None:
    """numpy scalars, tensors without axes, missing log-probs, keys that are no text."""
    torch = pytest.importorskip("torch")
    plain = [slime_sample(n, metadata={0: "first", "ok": True}) for n in range(2)]
    odd = [
        slime_sample(
            n,
            reward=np.float64(1.0) if n else torch.tensor(1.0),
            tokens=np.array([11, 12, 13, 21, 20 + n]) if n else torch.tensor([11, 12, 13, 21, 20]),
            rollout_log_probs=[np.float32(-0.5), -0.25],
            metadata={0: "first", "ok": np.bool_(True)},
        )
        for n in range(2)
    ]
    for side, samples in (("b", plain), ("t", odd)):
        (tmp_path / side).mkdir()
        torch.save({"rollout_id": 4, "samples": samples}, tmp_path / side / "rollout_4.pt")
        torch.save({"samples": samples}, tmp_path / side / "eval_4.pt")
        torch.save(torch.zeros(2), tmp_path / side / "weights.pt")
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    assert differing(result) == {} and result.summary["steps"] == [4] and result.lack is None
    assert "eval_4.pt is of an evaluation and was left aside" in result.summary["notes"]


def test_a_missing_log_prob_is_no_number(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for side, log_probs in (("b", [-0.5, -0.25]), ("t", [None, -0.25])):
        (tmp_path / side).mkdir()
        samples = [slime_sample(0, rollout_log_probs=log_probs)]
        torch.save({"rollout_id": 0, "samples": samples}, tmp_path / side / "0.pt")
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
    row = result.row(one(result, "rollout_log_probs"))
    assert (row["status"], row["reason"], row["error"]) == ("nonfinite", "target", None)


# ------------------------------------------------------------------------------- hostile


def test_repetitions_that_multiply_and_values_that_hold_themselves() -> None:
    inner: list[Any] = ["x"] * 10
    for _ in range(40):
        inner = [inner] * 10
    assert read_pickle(memoryview(pickle.dumps(inner)))[0] is not None
    inner = []
    inner.append(inner)
    with pytest.raises(ValueError, match="holds itself"):
        read_pickle(memoryview(pickle.dumps(inner)))
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    with pytest.raises(ValueError, match="nests deeper"):
        read_pickle(memoryview(pickle.dumps(deep)))


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("verl_0.9.1.dp", files.data_proto),
        ("verl_0.9.1_numpy.dp", files.data_proto),
        ("verl_0.9.1_tq.pt", files.transfer_queue),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, name: str, read: Callable[[Path], Any]) -> None:
    whole = (CASES / name).read_bytes()
    draw = random.Random(name)
    path = tmp_path / name
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice([len(data)] * 3 + [draw.randrange(len(data))])])
        try:
            read(path)
        except RlprobeError as error:
            refused += 1
            assert str(path) in str(error) and "\n" not in str(error)
    assert refused > 50


def test_pickles_of_every_protocol_are_the_same() -> None:
    value = {
        "s": {1, 2}, "f": frozenset(["a"]), "o": collections.OrderedDict(a=1, b=(2, None)),
        "b": b"\x00\xff", "n": np.arange(6, dtype=np.int16).reshape(2, 3), "t": 1 << 70,
        "x": np.array(["u", None], dtype=object), "z": np.float16(0.5), "e": np.zeros((0, 2)),
    }  # fmt: skip
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        made = read_pickle(memoryview(pickle.dumps(value, protocol)))
        assert sorted(made["s"]) == [1, 2] and made["f"] == ["a"]
        assert made["o"] == {"a": 1, "b": [2, None]} and made["t"] == 1 << 70
        assert bytes(made["b"]) == b"\x00\xff" and made["z"] == 0.5
        assert made["n"].raw.tolist() == [[0, 1, 2], [3, 4, 5]] and made["n"].dtype.name == "int16"
        assert made["x"] == ["u", None] and made["e"].raw.shape == (0, 2)


def test_tensors_of_every_layout(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tensordict = pytest.importorskip("tensordict")
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    columns = {
        "turned": whole.T[:3], "narrow": whole[:, 1:3], "half": whole.bfloat16(),
        "flag": whole > 5, "large": torch.tensor([2**63 - 1, -(2**63), 0]),
    }  # fmt: skip
    for batch in (
        tensordict.TensorDict(columns, batch_size=[3]),
        tensordict.TensorDict(columns, batch_size=[3]).contiguous().consolidate(),
    ):
        buffer = io.BytesIO()
        torch.save(batch, buffer)
        found = read_archive(memoryview(buffer.getvalue()))
        for key, tensor in columns.items():
            rows = found[key].rows()
            if key == "half":
                wide = np.stack([r.raw.astype(np.uint32) << 16 for r in rows]).view(np.float32)
                assert wide.tolist() == tensor.float().tolist()
            elif key == "large":
                assert rows == tensor.tolist()
            else:
                assert [r.raw.tolist() for r in rows] == tensor.tolist()


@pytest.mark.slow
def test_verl_writes_what_is_read(tmp_path: Path) -> None:
    """The installed verl's own batch, by its own method, and its own ``_write_generations``."""
    torch = pytest.importorskip("torch")
    protocol = pytest.importorskip("verl.protocol")
    trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    batch = protocol.DataProto.from_dict(
        tensors={"prompts": torch.tensor([[1, 2]]), "responses": torch.tensor([[3, 4, 5]])},
        non_tensors={"extra": np.array([{"turns": [1, 2]}], dtype=object)},
        meta_info={"temperature": 1.0},
    )
    (tmp_path / "5").mkdir()
    batch.save_to_disk(tmp_path / "5/gen_batch.dp")
    ((_, leaves),) = fields(tmp_path).items()
    assert leaves == {"prompts": "1 2", "responses": "3 4 5", "extra.turns": "1 2"}
    made = read_pickle(memoryview((tmp_path / "5/gen_batch.dp").read_bytes()))
    assert isinstance(made, DataProto) and not isinstance(made.batch, Rows)
    trainer.RayPPOTrainer._write_generations(
        ["q"], ["a"], [None], [0.5], {"acc": [np.float32(1.0)], "odd": [1, 2]},
        str(tmp_path / "jsonl"), 3,
    )  # fmt: skip
    ((_, leaves),) = fields(tmp_path / "jsonl").items()
    assert leaves == {"input": "q", "output": "a", "gts": None, "score": 0.5, "acc": "1.0"}


@pytest.mark.parametrize(
    ("case", "name", "place"),
    [
        ("verl_0.9.1.dp", "gen_batch.dp", "{step}"),
        ("verl_0.9.1_tq.pt", "tq_batch.pt", "{step}/0"),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_a_step_that_verl_was_ended_at_costs_itself(
    tmp_path: Path, case: str, name: str, place: str, cut: bool
) -> None:
    """verl writes meta.json last, and does not load a step without it; older ones write none."""
    for side in "bt":
        for step in (1, 2):
            where = tmp_path / side / "e_p" / place.format(step=step)
            where.mkdir(parents=True)
            shutil.copy(CASES / case, where / name)
            (where / "meta.json").write_text("{}")
    last = tmp_path / "t/e_p" / place.format(step=2)
    (last / "meta.json").unlink()
    if cut:
        (last / name).write_bytes((last / name).read_bytes()[:-40])
    result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out", coverage=0.4)
    assert result.summary["counts"]["matched"] == result.summary["counts"]["benchmark_only"] > 0
    assert f"{name} of step 2 has no meta.json beside it" in " ".join(result.summary["notes"])
    for meta in tmp_path.rglob("meta.json"):
        meta.unlink()
    if not cut:
        result = compared(tmp_path / "b", tmp_path / "t", tmp_path / "out")
        assert result.summary["counts"]["benchmark_only"] == 0
        assert "meta.json" not in " ".join(result.summary["notes"])
