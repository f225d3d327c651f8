# SPDX-License-Identifier: Apache-2.0
"""MessagePack that anybody may have written, read in bounded memory.

An empty map is one byte, and some 160 bytes in Python. And msgpack-python never gives
back what it had made of nested bytes once it finds that they are broken. So the bytes
are walked first: what is broken, or too much, it never sees.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import msgpack

# Items that a slice may hold, a container as four of them: it takes four times the memory.
# Some 100 MiB at worst. Of spans with a dozen attributes each, 16 MiB hold fewer.
_ITEMS_MAX = 1 << 20
_CONTAINER_ITEMS = 4
# Of one record: so one that is nothing but containers leaves the others readable.
_RECORD_ITEMS_MAX = _ITEMS_MAX // 16

# Deeper than any attribute is meant to be; msgpack-python ends at some hundreds.
_DEPTH_MAX = 64

# By the first byte: how many bytes of length follow it.
_TEXT_LENGTH = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # and raw bytes
_ARRAY_LENGTH = {0xDC: 2, 0xDD: 4}
_MAP_LENGTH = {0xDE: 2, 0xDF: 4}
# How many bytes of value follow it: nil and bool, floats, integers.
_VALUE_BYTES = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {
    first + power: 1 << power for first in (0xCC, 0xD0) for power in range(4)
}


class Map(dict[str, object]):
    """What of a map has a text for its key; ``others``: how many pairs have none."""

    others = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[object, object]]) -> Self:
        made = cls()
        for key, value in pairs:
            if isinstance(key, str):
                made[key] = value
            else:
                made.others += 1
        return made


class Unreadable(ValueError):
    """Says what is wrong with the bytes."""


@dataclass(slots=True)
class MsgpackReader:
    """Reads all MessagePack of one slice."""

    items_left: int = _ITEMS_MAX

    def read(self, encoded: bytes) -> object:
        """What the bytes say; Unreadable if they are broken, or say too much."""
        allowed = min(self.items_left, _RECORD_ITEMS_MAX)
        walk = _Walk(encoded, allowed)
        try:
            walk.run()
        finally:
            # Broken or not: the walk took its time.
            self.items_left -= min(walk.items, allowed)
        return msgpack.unpackb(
            encoded, unicode_errors="replace", strict_map_key=False, object_pairs_hook=Map.of
        )


@dataclass(slots=True)
class _Walk:
    """Over the heads of all items."""

    encoded: bytes
    allowed: int
    items: int = 1  # as many as all heads so far claim

    def run(self) -> None:
        encoded, size = self.encoded, len(self.encoded)
        outer: list[tuple[int, bool]] = []
        left, is_map = 1, False
        position = 0
        while True:
            while not left:
                if not outer:
                    if position != size:
                        raise Unreadable(f"ends after {size} bytes, says {position}")
                    return
                left, is_map = outer.pop()
            if position >= size:
                raise Unreadable("ends in the middle")
            first = encoded[position]
            position += 1
            is_key = is_map and not left % 2
            left -= 1
            if first <= 0x7F or first >= 0xE0:
                continue
            if 0xA0 <= first <= 0xBF:
                position += first & 0x1F
            elif first in _VALUE_BYTES:
                position += _VALUE_BYTES[first]
            elif first in _TEXT_LENGTH:
                width = _TEXT_LENGTH[first]
                position += width + int.from_bytes(encoded[position : position + width], "big")
            else:
                outer.append((left, is_map))
                left, is_map, width = self._container(first, position)
                position += width
                if is_key:
                    raise Unreadable("a key that is a map or an array")
                if len(outer) > _DEPTH_MAX:
                    raise Unreadable(f"nested more than {_DEPTH_MAX} deep")
                # An array gets room for what its head claims.
                self.items += _CONTAINER_ITEMS - 1 + left
                if self.items > self.allowed:
                    raise Unreadable(f"more than {self.allowed} items; a container counts as four")

    def _container(self, first: int, position: int) -> tuple[int, bool, int]:
        """How many items, whether a map's, and how many bytes of length."""
        if first <= 0x8F:
            return 2 * (first & 0x0F), True, 0
        if first <= 0x9F:
            return first & 0x0F, False, 0
        is_map = first in _MAP_LENGTH
        width = _MAP_LENGTH.get(first) or _ARRAY_LENGTH.get(first)
        if width is None:
            raise Unreadable(f"type {first:#x}")
        length = int.from_bytes(self.encoded[position : position + width], "big")
        return (2 * length if is_map else length), is_map, width
