# SPDX-License-Identifier: Apache-2.0
"""The stock, a gRPC server on PostgreSQL: ``python -m shop.stock ADDRESS:PORT``.

Environment: DATABASE_URL, ACCESS_LOG, RECEIPTS (a device or file for receipts).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from psycopg_pool import ConnectionPool

from . import trouble
from .access_log import Entry, handled
from .protocol import messages, services

_THREADS = 8
_ITEMS = 100
_STOCKTAKING_ITEM = _ITEMS  # which nobody orders by itself
_STOCKTAKING_S = 1.0
_RECEIPT_BYTES = 1 << 20

_TABLE = "CREATE TABLE IF NOT EXISTS stock (item int PRIMARY KEY, left_over int NOT NULL)"
_ROWS = f"""INSERT INTO stock SELECT item, 1000000 FROM generate_series(0, {_ITEMS}) item
            ON CONFLICT DO NOTHING"""


class StockMiscountedError(RuntimeError):
    """The numbers of an item do not add up."""


class Stock:
    """Answers the calls of stock.proto, in threads."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def Health(self, request: Any, context: Any) -> Any:  # noqa: N802 # as in stock.proto
        with self._pool.connection() as connection:
            connection.execute("SELECT 1")
        return messages.HealthReply()

    def Reserve(self, request: Any, context: Any) -> Any:  # noqa: N802 # as in stock.proto
        with handled("stock", request.order) as entry:
            entry.status = "UNKNOWN"
            match trouble.unusual(request.order):
                case trouble.Unusual.WANTS_RECEIPT:
                    _write_receipt(request.order)
                case trouble.Unusual.CRASHES:
                    ctypes.string_at(0)
            match trouble.of(request.order):
                case trouble.Trouble.STOCK_RAISES:
                    self._count(request.item, entry)
                    raise StockMiscountedError(f"item {request.item}: fewer than none are left")
                case trouble.Trouble.STOCK_IS_CLOSED:
                    self._count(request.item, entry)
                    entry.status, entry.outcome = "UNAVAILABLE", "closed"
                    context.set_code(grpc.StatusCode.UNAVAILABLE)
                    context.set_details("the warehouse is closed")
                    return messages.ReserveReply()
                case trouble.Trouble.ROW_IS_LOCKED:
                    left = self._reserve_while_counting(entry)
                    entry.outcome = "waited"
                case _:
                    left = self._reserve(request.item, entry)
            entry.status = "OK"
            return messages.ReserveReply(left=left)

    def _count(self, item: int, entry: Entry) -> int:
        with self._pool.connection() as connection:
            entry.calls["postgresql"] += 1
            (left,) = connection.execute(
                "SELECT left_over FROM stock WHERE item = %s", (item,)
            ).fetchone()
        return int(left)

    def _reserve(self, item: int, entry: Entry) -> int:
        self._count(item, entry)
        with self._pool.connection() as connection:
            entry.calls["postgresql"] += 1
            (left,) = connection.execute(
                "UPDATE stock SET left_over = left_over - 1 WHERE item = %s RETURNING left_over",
                (item,),
            ).fetchone()
        return int(left)

    def _reserve_while_counting(self, entry: Entry) -> int:
        """Somebody takes stock, on a connection of his own, and holds the row meanwhile."""
        with self._pool.connection() as stocktaker:
            entry.calls["postgresql"] += 1
            stocktaker.execute(
                "SELECT left_over FROM stock WHERE item = %s FOR UPDATE", (_STOCKTAKING_ITEM,)
            )
            done = threading.Timer(_STOCKTAKING_S, stocktaker.commit)
            done.start()
            left = self._reserve(_STOCKTAKING_ITEM, entry)
            done.join()
        return left


def _write_receipt(order: int) -> None:
    receipts = os.open(os.environ["RECEIPTS"], os.O_WRONLY)
    try:
        os.write(receipts, f"order {order}\n".encode().ljust(_RECEIPT_BYTES))
        os.fsync(receipts)
    finally:
        os.close(receipts)


def main() -> None:
    # Two of each thread's own: one may wait for the other.
    with ConnectionPool(os.environ["DATABASE_URL"], min_size=2, max_size=2 * _THREADS) as pool:
        with pool.connection() as connection:
            connection.execute(_TABLE)
            connection.execute(_ROWS)
        server = grpc.server(ThreadPoolExecutor(_THREADS))
        services.add_StockServicer_to_server(Stock(pool), server)
        if not server.add_insecure_port(sys.argv[1]):
            raise SystemExit(f"stock: cannot listen on {sys.argv[1]}")
        server.start()
        server.wait_for_termination()


if __name__ == "__main__":
    main()
