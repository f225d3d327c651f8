# SPDX-License-Identifier: Apache-2.0
"""Answers in memory: made in pieces, and bounded until their clients have read them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator

# Of answers that are made and being read, which a client may do slowly; one that is larger
# is read alone. Small ones are not counted: the server has few threads.
_SENDING_BYTES_MAX = 32 << 20
_SMALL_BYTES = 64 << 10

# For the others to read theirs; and how often it is looked who takes too long.
_ROOM_TIMEOUT_S = 10.0
_ROOM_LOOK_S = 1.0


class NoRoom(Exception):
    """Others have not read theirs yet."""


class Room:
    """For answers that are made, until they are read; whose comes first has it first.

    So many wait for it, and no more.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._taken: dict[Body, int] = {}
        self._waiting: list[Body] = []
        self._changed = threading.Condition()

    def take(self, body: Body) -> bool:
        """Wait for room, not for long; whether there is."""
        until_s = time.monotonic() + _ROOM_TIMEOUT_S
        with self._changed:
            if len(self._waiting) >= self._waiting_max:
                return False  # they are in memory while they wait
            self._waiting.append(body)
            try:
                while not self._is_there_for(body):
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return False
                    for other in list(self._taken):
                        other.give_up_overdue()
                    if not self._is_there_for(body):
                        self._changed.wait(min(left_s, _ROOM_LOOK_S))
                self._taken[body] = body.size
                return True
            finally:
                self._waiting.remove(body)
                self._changed.notify_all()

    def _is_there_for(self, body: Body) -> bool:
        taken = sum(self._taken.values())
        return self._waiting[0] is body and (not taken or taken + body.size <= _SENDING_BYTES_MAX)

    def give_back(self, body: Body) -> None:
        with self._changed:
            self._taken.pop(body, None)
            self._changed.notify_all()


class Body:
    """An answer as WSGI has it, which takes room until it is closed. NoRoom if there is none."""

    def __init__(
        self, pieces: list[bytes], room: Room, give_up_overdue: Callable[[], object]
    ) -> None:
        self.size = sum(map(len, pieces))
        self.give_up_overdue = give_up_overdue
        self._pieces = pieces
        self._room = room
        if self.size > _SMALL_BYTES and not room.take(self):
            raise NoRoom("others have not read their answers yet; ask again")

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._pieces)

    def close(self) -> None:
        """Called by who sends it, whether or not it was taken; perhaps twice."""
        self._pieces = []
        self._room.give_back(self)


def encoded(value: object, depth: int) -> Iterator[bytes]:
    """JSON in pieces: while one is encoded, no other thread runs, and the event loop is one."""
    if depth and isinstance(value, dict):
        separator = b"{"
        for key, item in value.items():
            yield separator + json.dumps(key).encode() + b":"
            yield from encoded(item, depth - 1)
            separator = b","
        yield b"}" if value else b"{}"
    elif depth and isinstance(value, list):
        separator = b"["
        for item in value:
            yield separator
            yield from encoded(item, depth - 1)
            separator = b","
        yield b"]" if value else b"[]"
    else:
        yield json.dumps(value).encode()
