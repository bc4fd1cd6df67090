"""Does any reader fall over an input that is nearly right?

Inputs are Hypothesis's (``tests/unit/hostile/odd.py``), by the structure of each format, after all
that once failed (``corpus/``). What fails is made as small as it can be, shown, and kept for the
corpus.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, example, given, settings

from rlprobe.dumps.tensors.tensorfile import TensorFileError
from rlprobe.errors import RlprobeError
from tests.soak.conftest import MINUTES, Rounds
from tests.unit.hostile import good, odd
from tests.unit.hostile.readers import ALIASES, READERS, SUFFIXES

#: What is no such file has an identity as well.
_NEVER_REFUSES = {"safetensors"}
#: Inputs of a reader in the short form, and of each round of the long one.
_SHORT, _ROUND = 25, 400
#: Readers that start a process each time.
_APART = {"records": 10}
#: An input that takes longer is a finding as well.
_LONGEST_S = 30.0


def reads_or_refuses(reader: str, place: Path, figures: Counter[str]) -> Callable[[bytes], None]:
    """What is asked of every input: no other error than the one of a sentence, within its time."""
    path = place / f"f{SUFFIXES.get(reader, '')}"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        began = time.monotonic()
        figures["fuzzed inputs"] += 1
        try:
            READERS[reader](path)
            figures["fuzzed inputs that were read"] += 1
        except (RlprobeError, TensorFileError) as error:
            str(error).encode("utf-8", "backslashreplace")
            figures["fuzzed inputs that were refused"] += 1
        except BaseException:  # a panic of polars is no Exception
            # the last that is tried is the smallest
            kept = Path(tempfile.gettempdir(), f"rlprobe-fuzz-{reader}{path.suffix}")
            kept.write_bytes(data)
            hypothesis.note(f"kept as {kept}")
            raise
        assert time.monotonic() - began < _LONGEST_S, f"{reader}: it took too long"

    return check


@pytest.mark.parametrize("reader", sorted(set(READERS) - ALIASES.keys()))
def test_every_input_is_read_or_refused(
    reader: str, rounds: Rounds, chance: random.Random, memory: Path, figures: Counter[str]
) -> None:
    place = memory / "fuzz" / reader
    place.mkdir(parents=True)
    before = Counter(figures)
    names = {reader, *(alias for alias, name in ALIASES.items() if name == reader)}
    past = [p for p in sorted(good.CORPUS.iterdir()) if p.name.partition("-")[0] in names]
    for number in rounds(0.9 / len(READERS), 1):
        check = given(odd.inputs(reader))(reads_or_refuses(reader, place, figures))
        for data in [path.read_bytes() for path in past] if number == 0 else []:
            check = example(data)(check)
        check = settings(
            max_examples=_APART.get(reader, _ROUND if MINUTES else _SHORT),
            deadline=None,
            database=None,
            derandomize=False,
            suppress_health_check=list(HealthCheck),
        )(check)
        hypothesis.seed(chance.randrange(1 << 32))(check)()
    done = figures - before
    # a fuzzer whose inputs are all refused at the first byte, or all read, shows nothing
    total = done["fuzzed inputs"]
    assert total >= len(past) + 1
    if MINUTES:
        assert done["fuzzed inputs that were read"], reader
        assert done["fuzzed inputs that were refused"] or reader in _NEVER_REFUSES, reader


def test_every_good_input_is_read(tmp_path: Path) -> None:
    """What is edited is read as it is, or its edits would show nothing."""
    for reader, number in itertools.product(sorted(set(READERS) - ALIASES.keys()), range(9)):
        known = good.inputs(reader)
        if number < len(known) and (reader, number) not in _REFUSED:
            path = tmp_path / f"{reader}{number}{SUFFIXES.get(reader, '')}"
            path.write_bytes(known[number])
            READERS[reader](path)


#: Good of their kind, and refused for what is not in the file itself.
_REFUSED: set[tuple[str, int]] = set()
