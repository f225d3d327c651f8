# SPDX-License-Identifier: Apache-2.0
"""What instrumentations are asked to tell beyond their spans: who answered a request.

HTTP servers name their node in a response header, by the response propagator of
opentelemetry.instrumentation, and clients read it in the response hooks of their
instrumentations. gRPC is in _grpc.py. Without any of this the peer's address is a hint.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from backsight.otel._propagator import RESPONSE_HEADER, Current

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_log = logging.getLogger("backsight")


def answered(span: Span, headers: Any) -> None:  # noqa: ANN401 # see _answering_node
    """The request of this client span was answered with these headers."""
    processor = Current.processor
    if processor is None or headers is None:
        return
    try:
        node = _answering_node(headers)
        if node:
            processor.answered(span.get_span_context(), node)
    except Exception:  # noqa: BLE001 - a class of others, in the middle of a request
        _log.debug("response headers of %s cannot be read", type(headers), exc_info=True)


def _answering_node(headers: Any) -> str:  # noqa: ANN401 # anything with .get(), or pairs
    """The node that they name; "" for none."""
    if hasattr(headers, "get"):
        node = headers.get(RESPONSE_HEADER)
    else:
        named = (value for key, value in headers if _text(key).lower() == RESPONSE_HEADER)
        node = next(named, None)
    return "" if node is None else _text(node)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


# ------------------------------------------------------------ response hooks


def _on_response(span: Span, request: Any, response: Any) -> None:  # noqa: ANN401
    """requests, urllib3 and urllib give their own response, httpx a named tuple of parts."""
    answered(span, getattr(response, "headers", None))


def _on_aiohttp_response(span: Span, parameters: Any) -> None:  # noqa: ANN401
    """Of a request that ended, or of an exception, which has no response."""
    answered(span, getattr(getattr(parameters, "response", None), "headers", None))


async def _on_async_response(span: Span, request: Any, response: Any) -> None:  # noqa: ANN401
    _on_response(span, request, response)


def instrumentor_arguments(name: str) -> dict[str, Any]:
    """What to give to the instrumentor of that entry point."""
    match name:
        case "httpx":
            return {"response_hook": _on_response, "async_response_hook": _on_async_response}
        case "requests" | "urllib3" | "urllib":
            return {"response_hook": _on_response}
        case "aiohttp-client":
            return {"response_hook": _on_aiohttp_response}
    return {}


def patch(name: str) -> None:
    """Do what must be done before the instrumentor of that entry point is loaded."""
    if name.startswith("grpc_"):
        from backsight.otel import _grpc

        _grpc.patch(name)
