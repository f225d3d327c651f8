# SPDX-License-Identifier: Apache-2.0
"""What a program sends that breaks the protocol, by a fault of its own, is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from protocol.wire import WireError

_Said = TypeVar("_Said")


def encoded(
    items: Sequence[_Said],
    encode: Callable[[Sequence[_Said]], bytes],
    leave_out: Callable[[WireError], None],
) -> Iterator[bytes]:
    """One message of the stream; one each, without those that cannot be, where any cannot.

    An item that cannot be encoded would be no better on the next stream, and end that one too.
    """
    try:
        yield encode(items)
    except WireError as error:
        if len(items) == 1:
            leave_out(error)
            return
        for item in items:
            yield from encoded([item], encode, leave_out)
