# SPDX-License-Identifier: Apache-2.0
"""``make hostile-peers``, for a short time: nobody honest loses by any attack."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.hostile_peers.__main__ import ATTACKS

# Long enough for each to begin, and for some requests beside it.
_ATTACK_S = 5


@pytest.mark.root
@pytest.mark.slow
def test_thirty_honest_nodes_lose_nothing_by_any_attack() -> None:
    duration = {"DURATION": str(_ATTACK_S * len(ATTACKS))}
    subprocess.run(
        [sys.executable, "-m", "tests.hostile_peers"], env={**os.environ, **duration}, check=True
    )
