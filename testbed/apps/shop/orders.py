# SPDX-License-Identifier: Apache-2.0
"""Orders, Flask under gunicorn: GET /orders/ID, /health.

Prices come from Redis, the stock by gRPC. Where the warehouse is closed, the order is taken
and delivered later. Environment: REDIS_URL, STOCK_ADDRESS, ACCESS_LOG.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

import grpc
import redis
from flask import Flask, Response, jsonify

from . import trouble
from .access_log import handled
from .protocol import messages, services

_TIMEOUT_S = 10.0
_ITEMS = 100
_BOOK_IS_HELD_S = 0.6

app = Flask(__name__)

# Invoices are numbered one after the other.
_book = threading.Lock()


@functools.cache
def _prices() -> Any:
    return redis.Redis.from_url(os.environ["REDIS_URL"])


@functools.cache
def _stock() -> Any:
    return services.StockStub(grpc.insecure_channel(os.environ["STOCK_ADDRESS"]))


@app.get("/health")
def health() -> Response:
    _prices().ping()
    _stock().Health(messages.HealthRequest(), timeout=_TIMEOUT_S)
    return jsonify({"orders": "well"})


@app.get("/orders/<int:order>")
def show(order: int) -> tuple[Response, int]:
    with handled("orders", order) as entry:
        item = order % _ITEMS
        entry.status = "500"
        match trouble.unusual(order):
            case trouble.Unusual.HOLDS_BOOK:
                with _book:
                    time.sleep(_BOOK_IS_HELD_S)
            case trouble.Unusual.WANTS_BOOK:
                with _book:
                    pass
        entry.calls["redis"] += 2
        price = int(_prices().get(f"price:{item}") or 100 + item)
        _prices().set(f"price:{item}", price)
        entry.calls["grpc"] += 1
        request = messages.ReserveRequest(order=order, item=item)
        try:
            left = _stock().Reserve(request, timeout=_TIMEOUT_S).left
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                entry.outcome = f"stock said {error.code().name}"
                return jsonify({"error": "no stock"}), 500
            entry.outcome, left = "fallback", 0
        entry.status = "200"
        return jsonify({"price": price, "left": left}), 200
