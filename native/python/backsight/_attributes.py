# SPDX-License-Identifier: Apache-2.0
"""Attributes of a span, in the encoding of backsight.h."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from backsight._native import lib

AttributeValue: TypeAlias = str | bool | int | float | bytes

TRUNCATED_KEY = "backsight.truncated"
"""An attribute that the client adds when others did not fit: how many were cut or left out."""

_STRING = lib.BS_ATTRIBUTE_STRING
_INT = lib.BS_ATTRIBUTE_INT
_DOUBLE = lib.BS_ATTRIBUTE_DOUBLE
_BOOL = lib.BS_ATTRIBUTE_BOOL
_BYTES = lib.BS_ATTRIBUTE_BYTES

_HEADER_BYTES = 4
_pack_header = struct.Struct("=BBH").pack  # struct bs_attribute_header

_KEY_BYTES_MAX = 255  # bs_attribute_header.key_bytes
_VALUE_BYTES_MAX = 65535  # bs_attribute_header.value_bytes
_TRUNCATED_BYTES = _HEADER_BYTES + len(TRUNCATED_KEY) + 8


def encode_text(text: str) -> bytes:
    """UTF-8; what cannot be encoded (a lone surrogate) becomes a question mark."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def cut_utf8(text: bytes, size: int) -> bytes:
    """At most size bytes of a UTF-8 text, cut between characters."""
    if len(text) <= size:
        return text
    while size > 0 and text[size] & 0xC0 == 0x80:
        size -= 1
    return text[:size]


def encode_attributes(attributes: Mapping[str, AttributeValue], room_bytes: int) -> bytes:
    """Encode in at most ``room_bytes``, in the mapping's order.

    What is too long is cut, the largest first, what finds no room is left out,
    and TRUNCATED_KEY says how many. Integers beyond 64 bits become text.
    TypeError for keys and values of other types.
    """
    whole = _encode_plain(attributes)
    if whole is not None and len(whole) <= room_bytes:
        return whole
    encoded = [_encode(name, value) for name, value in attributes.items()]
    return _join(encoded if _fit(encoded, room_bytes) else _cut(encoded, room_bytes))


def _encode_plain(attributes: Mapping[str, AttributeValue]) -> bytes | None:
    """The usual case, quickly.

    None for what is out of the ordinary: a subclass, a lone surrogate, a number or text too
    large, a mistake.
    """
    parts: list[bytes] = []
    try:
        for name, value in attributes.items():
            kind, encode = _ENCODERS[type(value)]
            key, raw = name.encode(), encode(value)
            parts += (_pack_header(kind, len(key), len(raw)), key, raw)
    except (KeyError, AttributeError, UnicodeEncodeError, struct.error):
        return None
    return b"".join(parts)


_Encoded: TypeAlias = tuple[int, bytes, bytes]

_ENCODERS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    str: (_STRING, str.encode),
    bool: (_BOOL, (b"\0", b"\1").__getitem__),  # before int, of which it is one
    int: (_INT, struct.Struct("=q").pack),
    float: (_DOUBLE, struct.Struct("=d").pack),
    bytes: (_BYTES, bytes),
}


def _encode(name: str, value: AttributeValue) -> _Encoded:
    if not isinstance(name, str):
        raise TypeError(f"attribute names are str, not {name!r}")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        # In hex, as ids are written, and as Python converts any number of digits of.
        value = hex(value)
    if isinstance(value, str):
        return _STRING, encode_text(name), encode_text(value)
    for allowed, (kind, encode) in _ENCODERS.items():
        if isinstance(value, allowed):
            return kind, encode_text(name), encode(value)
    raise TypeError(f"attribute {name!r} is {value!r}; allowed are str, int, float, bool, bytes")


def _join(encoded: Iterable[_Encoded]) -> bytes:
    return b"".join(
        [_pack_header(kind, len(key), len(raw)) + key + raw for kind, key, raw in encoded]
    )


def _fit(encoded: list[_Encoded], room_bytes: int) -> bool:
    return all(
        len(key) <= _KEY_BYTES_MAX and len(raw) <= _VALUE_BYTES_MAX for _, key, raw in encoded
    ) and room_bytes >= sum(_HEADER_BYTES + len(key) + len(raw) for _, key, raw in encoded)


def _cut(encoded: list[_Encoded], room_bytes: int) -> Iterator[_Encoded]:
    truncated = 0
    for (kind, key, value), granted in zip(
        encoded, _shares(encoded, room_bytes - _TRUNCATED_BYTES), strict=True
    ):
        shorter_key = cut_utf8(key, _KEY_BYTES_MAX)
        room = min(granted - _HEADER_BYTES - len(shorter_key), _VALUE_BYTES_MAX)
        shorter = value
        if len(value) > room:
            if kind == _STRING and room > 0:
                shorter = cut_utf8(value, room)
            elif kind == _BYTES and room > 0:
                shorter = value[:room]
            else:
                truncated += 1
                continue
        truncated += len(shorter_key) < len(key) or len(shorter) < len(value)
        yield kind, shorter_key, shorter
    yield _encode(TRUNCATED_KEY, truncated)


def _shares(encoded: list[_Encoded], room_bytes: int) -> list[int]:
    """How many bytes each may take: max-min fair, so that one large value does not cost the small ones."""
    wanted = [
        _HEADER_BYTES + min(len(key), _KEY_BYTES_MAX) + len(value) for _, key, value in encoded
    ]
    shares = [0] * len(wanted)
    for taken, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], room_bytes // (len(wanted) - taken))
        room_bytes -= shares[index]
    return shares
