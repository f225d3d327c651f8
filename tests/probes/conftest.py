# SPDX-License-Identifier: Apache-2.0
"""What the tests of probes share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=["core", pytest.param("bcc", marks=pytest.mark.slow)])
def loader(request: pytest.FixtureRequest) -> str:
    """By which the probes are loaded (`probes.loader`): each of them sees the same."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module", params=["core", "bcc"])
def either_loader(request: pytest.FixtureRequest) -> str:
    """The same, for what is tested by both each time."""
    chosen: str = request.param
    return chosen
