# SPDX-License-Identifier: Apache-2.0
"""What fuzzing begins with is taken as it is in earnest; and bytes that mean nothing do no harm."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.targets import TARGETS

# The fuzzer makes more of them, and follows where they lead.
_CHANGED = 20

# pytest undoes the filter of protocol.wire.
pytestmark = pytest.mark.filterwarnings("ignore:Unexpected end-group tag")


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_what_is_like_them_raise_nothing(name: str) -> None:
    take = TARGETS[name]()
    rng = random.Random(1)
    seeds = list(take.seeds())
    assert seeds
    for seed in seeds:
        take(seed)
        for _ in range(_CHANGED):
            changed = bytearray(seed)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            take(bytes(changed))
