# SPDX-License-Identifier: Apache-2.0
"""Who loses records is named, who loses the most first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from appliance.clients import Client
from appliance.lossy import most_lossy


def client(number: int) -> Client:
    """One of user 33, whose pid tells its number."""
    fields = SimpleNamespace(number=number, pid=1000 + number, uid=33, service="shop")
    return cast(Client, fields)


def lossy(lost: dict[int, int]) -> list[dict[str, Any]]:
    """By what each number has lost."""
    return most_lossy([client(number) for number in lost], lost.__getitem__)


def test_who_lost_the_most_comes_first_and_who_lost_nothing_is_not_there() -> None:
    assert lossy({1: 5, 2: 0, 3: 7}) == [
        {"pid": 1003, "uid": 33, "service": "shop", "records_lost": 7},
        {"pid": 1001, "uid": 33, "service": "shop", "records_lost": 5},
    ]


def test_there_are_no_more_than_a_person_looks_into() -> None:
    named = [one["records_lost"] for one in lossy({number: number for number in range(1024)})]
    assert named == list(range(1023, 1015, -1))
