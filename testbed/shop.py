# SPDX-License-Identifier: Apache-2.0
"""How the shop's services are run (testbed/apps/shop), and on which of three nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from testbed.processes import Postgresql, Redis

SERVICES = {"front": "node-1", "orders": "node-2", "stock": "node-3"}
"""Where each runs."""

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Command:
    """``arguments``: without what instruments it; ``environment``: what it needs besides."""

    arguments: list[str]
    environment: dict[str, str]


def commands(addresses: Mapping[str, str], *, backlog: int | None = None) -> dict[str, Command]:
    """Of each service, that listens at its address (``HOST:PORT``) and knows where the next one is.

    ``backlog``: connections that wait for the front end; None: its default.
    """
    host, port = addresses["front"].split(":")
    return {
        "stock": Command(
            ["python", "-m", "shop.stock", addresses["stock"]],
            {"DATABASE_URL": Postgresql.URL},
        ),
        "orders": Command(
            [
                "gunicorn", "--bind", addresses["orders"], "--threads", str(_THREADS),
                # The front end keeps its connections.
                "--keep-alive", "60", "--no-control-socket", "shop.orders:app",
            ],
            {"REDIS_URL": Redis.URL, "STOCK_ADDRESS": addresses["stock"]},
        ),
        "front": Command(
            [
                "uvicorn", "--host", host, "--port", port,
                *(("--backlog", str(backlog)) if backlog is not None else ()),
                # Else a request may begin in the context of the one before it on its
                # connection, as a part of that one's trace (cpython #140947).
                "--reset-contextvars", "--no-access-log", "shop.front:app",
            ],
            {"ORDERS_URL": f"http://{addresses['orders']}"},
        ),
    }  # fmt: skip
