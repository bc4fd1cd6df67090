"""Does any reader fall over an input that is nearly right?"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tests.soak.conftest import Rounds
from tests.unit.hostile import fuzz
from tests.unit.hostile.readers import READERS

_AT_ONCE = 200


def test_every_input_is_read_or_refused(
    rounds: Rounds, chance: random.Random, figures: Counter[str]
) -> None:
    read = refused = 0
    for _ in rounds(0.25, 3):
        tally = fuzz.run(_AT_ONCE, chance.randrange(1 << 32))
        figures["fuzzed inputs"] += tally.inputs
        figures["fuzzed inputs, read or refused"] += tally.read + tally.refused
        assert tally.failures == []
        assert tally.slowest_s < 30, tally.line()
        read, refused = read + tally.read, refused + tally.refused
    # a fuzzer whose inputs are all refused at the first byte, or all read, shows nothing
    assert read > (read + refused) / 50
    assert refused > read


def test_every_reader_has_a_seed(tmp_path: Path) -> None:
    assert fuzz.seeds(tmp_path).keys() == READERS.keys()
