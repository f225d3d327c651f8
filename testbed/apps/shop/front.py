# SPDX-License-Identifier: Apache-2.0
"""The front end, FastAPI under uvicorn: GET /orders/ID, /orders/ID/invoice, /health.

Environment: ORDERS_URL, ACCESS_LOG.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from . import trouble
from .access_log import handled

_TIMEOUT_S = 10.0


class InvoiceError(RuntimeError):
    """An invoice that cannot be written, though all is there for it."""


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=os.environ["ORDERS_URL"], timeout=_TIMEOUT_S) as client:
        app.state.orders = client
        yield


app = FastAPI(lifespan=_lifespan)


@app.get("/health")
async def health() -> dict[str, str]:
    response = await app.state.orders.get("/health")
    return {"orders": response.json()["orders"]}


@app.get("/orders/{order}/invoice")
@app.get("/orders/{order}")
async def show(order: int) -> JSONResponse:
    with handled("front", order) as entry:
        entry.status = "500"  # unless it gets further
        entry.calls["http"] += 1
        response = await app.state.orders.get(f"/orders/{order}")
        if response.status_code != httpx.codes.OK:
            entry.outcome = f"orders said {response.status_code}"
            return JSONResponse({"order": order, "error": "try again later"}, 500)
        content = _invoice(order, response.json())
        entry.status = "200"
        return JSONResponse(content)


def _invoice(order: int, content: dict[str, object]) -> dict[str, object]:
    if trouble.of(order) is trouble.Trouble.FRONT_RAISES:
        raise InvoiceError(f"order {order} has no address")
    return {"order": order, **content}
