# SPDX-License-Identifier: Apache-2.0
"""A request by aiohttp: ``fetch.py URL`` prints the trace id, in hexadecimal."""

from __future__ import annotations

import asyncio
import sys

import aiohttp  # type: ignore[import-not-found]
from opentelemetry import trace

import backsight


async def fetch(url: str) -> None:
    with trace.get_tracer("fetch").start_as_current_span("fetch") as span:
        print(format(span.get_span_context().trace_id, "032x"))
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200


if __name__ == "__main__":
    assert backsight.wait_attached(20)
    asyncio.run(fetch(sys.argv[1]))
