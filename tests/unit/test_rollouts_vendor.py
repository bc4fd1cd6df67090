"""Can rollouts be read out of a dump that holds key data only?"""

import shutil

import numpy as np
import pytest

from rlprobe.errors import ReplayError
from rlprobe.rollouts import sample_digest, vendor


def micro_batch(first_token: int, rows: int = 2) -> dict[str, np.ndarray]:
    """Left-padded prompts of 3 and right-padded responses of 2 tokens."""
    prompts = np.array([[0, first_token + row, 5] for row in range(rows)])
    responses = np.array([[first_token + row, 0] for row in range(rows)])
    mask = np.tile([0, 1, 1, 1, 0], (rows, 1))
    return {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": mask,
        "position_ids": np.tile([0, 0, 1, 2, 3], (rows, 1)),
        "input_ids": np.concatenate([prompts, responses], axis=1),
    }


def put(dump, batch, step=0, rank=0, micro_step=0):
    for key, array in batch.items():
        place = dump / "data" / key / f"step{step}" / f"rank{rank}" / f"micro_step{micro_step}"
        place.mkdir(parents=True)
        np.save(place / f"{key}.npy", array)


@pytest.fixture
def dump(tmp_path):
    put(tmp_path, micro_batch(10), rank=0, micro_step=0)
    put(tmp_path, micro_batch(20), rank=0, micro_step=1)
    put(tmp_path, micro_batch(30), rank=1, micro_step=0)
    put(tmp_path, micro_batch(40), rank=1, micro_step=1)
    return tmp_path


def test_rows_come_rank_by_rank_and_micro_step_by_micro_step(dump):
    rollouts = vendor.read_step(dump, 0)
    assert rollouts.tensors["responses"][:, 0].tolist() == [10, 11, 20, 21, 30, 31, 40, 41]


def test_digests_cover_valid_tokens_only(dump):
    assert vendor.read_step(dump, 0).samples[2].sample_digest == sample_digest([20, 5], [20])


def test_ten_micro_steps_are_in_numeric_order(tmp_path):
    for m in range(11):
        put(tmp_path, micro_batch(100 + m, rows=1), micro_step=m)
    firsts = vendor.read_step(tmp_path, 0).tensors["responses"][:, 0]
    assert firsts.tolist() == list(range(100, 111))


def test_a_tensor_parallel_peer_does_not_double_the_rows(dump):
    put(dump, micro_batch(10), rank=2, micro_step=0)
    put(dump, micro_batch(20), rank=2, micro_step=1)
    rollouts = vendor.read_step(dump, 0)
    assert len(rollouts) == 8
    assert rollouts.meta["duplicate_ranks"] == [2]


def test_steps_are_those_every_key_has(dump):
    put(dump, micro_batch(1), step=1)
    put(dump, micro_batch(1), step=2)
    shutil.rmtree(dump / "data" / "prompts" / "step1")
    assert vendor.steps(dump) == [0, 2]
    with pytest.raises(ReplayError, match="step 1 has no prompts; complete steps: 0, 2"):
        vendor.read_step(dump, 1)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("data", r"neither step\{N\}.h5 files nor data/"),
        ("data/position_ids", "position_ids missing; a replay needs"),
        ("data/prompts/step0/rank1", "rank1 has no prompts, which other keys have"),
        (
            "data/prompts/step0/rank1/micro_step0",
            "rank1/micro_step0 has no prompts, which other keys",
        ),
        ("data/prompts/step0/rank1/micro_step0/prompts.npy", "rank1/micro_step0 has no prompts"),
    ],
)
def test_what_is_missing_is_named(dump, missing, message):
    path = dump / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ReplayError, match=message):
        vendor.read_step(dump, 0)


def replace(dump, key, array, **kwargs):
    np.save(dump / "data" / key / "step0/rank1/micro_step0" / f"{key}.npy", array, **kwargs)


def test_a_pickle_is_never_loaded(dump):
    replace(dump, "prompts", np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(ReplayError, match="not a readable array"):
        vendor.read_step(dump, 0)


def test_a_header_that_claims_more_than_the_file_holds_is_refused(dump):
    path = dump / "data/prompts/step0/rank1/micro_step0/prompts.npy"
    path.write_bytes(path.read_bytes().replace(b"(2, 3)", b"(2, 999999999999)")[:200])
    with pytest.raises(ReplayError, match="not a readable array"):
        vendor.read_step(dump, 0)


def test_micro_batches_of_other_lengths_are_refused_with_both_shapes(dump):
    replace(dump, "prompts", np.zeros((2, 4), dtype=np.int64))
    with pytest.raises(ReplayError, match=r"int64 \[rows, 4\] against int64 \[rows, 3\]"):
        vendor.read_step(dump, 0)


def test_keys_that_disagree_about_rows_are_refused(dump):
    replace(dump, "prompts", np.zeros((3, 3), dtype=np.int64))
    with pytest.raises(ReplayError, match="different numbers of rows"):
        vendor.read_step(dump, 0)


def test_whole_floats_are_token_ids(dump):
    """msprobe's SingleSave turns every tensor to float before it writes it."""
    expected = vendor.read_step(dump, 0)
    for path in (dump / "data").rglob("*.npy"):
        np.save(path, np.load(path).astype(np.float32))
    found = vendor.read_step(dump, 0)
    assert found.tensors["prompts"].dtype == np.int64
    assert [s.sample_digest for s in found.samples] == [s.sample_digest for s in expected.samples]


def test_lists_of_rows_without_micro_batches_are_batches(tmp_path):
    """save_ex of a list: a file a row, and no directory of micro-batches."""
    put(tmp_path / "whole", micro_batch(10))
    for key, array in micro_batch(10).items():
        place = tmp_path / "list/data" / key / "step0/rank0"
        place.mkdir(parents=True)
        for n, row in enumerate(array):
            np.save(place / f"{key}.{n}.npy", row.astype(np.float32))
    found = vendor.read_step(tmp_path / "list", 0)
    expected = vendor.read_step(tmp_path / "whole", 0)
    assert found.tensors["input_ids"].tolist() == expected.tensors["input_ids"].tolist()


@pytest.mark.parametrize("ids", [np.full((2, 2), 0.5), np.full((2, 2), np.nan)])
def test_other_floats_are_not_token_ids(dump, ids):
    replace(dump, "responses", ids)
    with pytest.raises(ReplayError, match=r"responses.*ids are whole numbers"):
        vendor.read_step(dump, 0)
