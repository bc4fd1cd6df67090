"""Do digests tell samples apart, and only samples?"""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlprobe.errors import ReplayError
from rlprobe.rollouts import (
    prompt_digest,
    prompt_identity,
    response_digest,
    sample_digest,
    sample_ids,
)

tokens = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8)


def test_the_documented_bytes_are_what_is_hashed():
    framed = b"rlprobe sample 1\0" + struct.pack("<qqq", 2, 5, 6) + struct.pack("<qq", 1, 7)
    assert sample_digest([5, 6], [7]) == "sha256:" + hashlib.sha256(framed).hexdigest()


def test_integer_type_byte_order_and_container_do_not_matter():
    same = {
        prompt_digest(ids)
        for ids in (
            [1, 2, 3],
            (1, 2, 3),
            np.array([1, 2, 3], dtype=np.int32),
            np.array([1, 2, 3], dtype=">i8"),
            np.array([1, 9, 2, 9, 3, 9])[::2],
        )
    }
    assert len(same) == 1


def test_prompt_and_response_of_equal_tokens_have_different_digests():
    assert prompt_digest([1]) != response_digest([1])


@settings(deadline=None)
@given(tokens, tokens, tokens, tokens)
def test_two_samples_share_a_digest_only_when_equal(p1, r1, p2, r2):
    assert (sample_digest(p1, r1) == sample_digest(p2, r2)) == ((p1, r1) == (p2, r2))


@settings(deadline=None)
@given(tokens, st.integers(0, 8))
def test_moving_the_border_between_prompt_and_response_changes_the_digest(ids, cut):
    whole = sample_digest(ids, [])
    assert (sample_digest(ids[:cut], ids[cut:]) == whole) == (ids[cut:] == [])


@pytest.mark.parametrize("ids", [[1.0, 2.0], [[1, 2]], "12", np.zeros(3, dtype=bool), 3])
def test_what_is_not_a_row_of_token_ids_is_refused(ids):
    with pytest.raises(ReplayError, match="one-dimensional integers"):
        sample_digest(ids, [])


def test_a_prompt_is_itself_whatever_container_a_trainer_puts_it_in():
    plain = {"raw_prompt": [{"role": "user", "content": "1+1="}], "data_source": "arithmetic"}
    as_numpy = {
        "data_source": np.array(["arithmetic"], dtype=object)[0],
        "raw_prompt": np.array([{"content": "1+1=", "role": "user"}], dtype=object),
    }
    assert prompt_identity(plain) == prompt_identity(as_numpy)
    assert prompt_identity(plain) != prompt_identity({**plain, "data_source": "other"})


def test_a_prompt_that_cannot_be_digested_says_where():
    with pytest.raises(ReplayError, match=r"prompt\.image\[0\] is a object"):
        prompt_identity({"image": [object()]})
    with pytest.raises(ReplayError, match=r"prompt\.x holds nan"):
        prompt_identity({"x": float("nan")})


def test_sample_ids_are_unique_and_follow_the_prompt_not_the_row():
    a, b = prompt_identity("a"), prompt_identity("b")
    ids = sample_ids(3, [a, b, a])
    assert len(set(ids)) == 3
    assert set(sample_ids(3, [b, a, a])) == set(ids)
    assert not set(sample_ids(4, [a, b, a])) & set(ids)
