# SPDX-License-Identifier: Apache-2.0
"""The encoding of attributes: exact where they fit, cut and marked where not."""

from __future__ import annotations

import enum
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backsight import TRUNCATED_KEY, AttributeValue
from backsight._attributes import cut_utf8, encode_attributes

ROOM = 32744  # BS_PAYLOAD_MAX - sizeof(struct bs_span_end)

TEXT = st.text(max_size=40)
VALUES = st.one_of(
    TEXT,
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.binary(max_size=40),
)
ATTRIBUTES = st.dictionaries(TEXT, VALUES, max_size=8)


def decode(encoded: bytes) -> list[tuple[str, AttributeValue]]:
    """By the text of backsight.h; anything left over is an error."""
    found: list[tuple[str, AttributeValue]] = []
    while encoded:
        kind, key_bytes, value_bytes = struct.unpack_from("=BBH", encoded)
        key = encoded[4 : 4 + key_bytes].decode()
        value = encoded[4 + key_bytes : 4 + key_bytes + value_bytes]
        assert len(value) == value_bytes
        encoded = encoded[4 + key_bytes + value_bytes :]
        match kind:
            case 1:
                found.append((key, value.decode()))
            case 2:
                found.append((key, struct.unpack("=q", value)[0]))
            case 3:
                found.append((key, struct.unpack("=d", value)[0]))
            case 4:
                assert value in (b"\0", b"\1")
                found.append((key, value == b"\1"))
            case 5:
                found.append((key, value))
            case _:
                pytest.fail(f"attribute type {kind}")
    return found


def typed(items: list[tuple[str, AttributeValue]]) -> list[tuple[str, str, AttributeValue]]:
    return [(key, type(value).__name__, value) for key, value in items]


@given(ATTRIBUTES)
@example({"pod": "cartservice-1", "duration_us": 1234})
def test_what_fits_comes_back_as_it_was(attributes: dict[str, AttributeValue]) -> None:
    encoded = encode_attributes(attributes, ROOM)
    assert typed(decode(encoded)) == typed(list(attributes.items()))


@given(ATTRIBUTES, st.integers(0, 300))
def test_what_does_not_fit_is_cut_and_marked(
    attributes: dict[str, AttributeValue], spare: int
) -> None:
    whole = encode_attributes(attributes, ROOM)
    room = 31 + spare  # at least for the mark
    encoded = encode_attributes(attributes, room)
    assert len(encoded) <= room
    if len(whole) <= room:
        assert encoded == whole
        return
    *kept, (mark, count) = decode(encoded)
    assert mark == TRUNCATED_KEY
    given = dict(attributes)
    assert [key for key, _ in kept] == [key for key in given if key in dict(kept)]
    changed = 0
    for key, value in kept:
        full = given[key]
        if value == full:
            continue
        changed += 1
        assert isinstance(value, str | bytes)
        assert isinstance(full, str | bytes)
        assert full[: len(value)] == value
    assert count == changed + len(given) - len(kept) > 0


def test_long_keys_and_values_are_cut_at_characters() -> None:
    found = decode(encode_attributes({"é" * 200: 1, "text": "€" * 30000, "after": True}, ROOM))
    assert found[0] == ("é" * 127, 1)
    assert found[1][0] == "text"
    value = found[1][1]
    assert isinstance(value, str)
    assert set(value) == {"€"}
    assert found[2:] == [("after", True), (TRUNCATED_KEY, 2)]


def test_a_large_value_does_not_cost_the_small_ones() -> None:
    found = dict(decode(encode_attributes({"sql": "s" * 60000, "status": 500, "ok": False}, 100)))
    sql = found.pop("sql")
    assert isinstance(sql, str)
    assert len(sql) == 100 - len(encode_attributes(found, 100)) - len("....sql")
    assert found == {"status": 500, "ok": False, TRUNCATED_KEY: 1}


@pytest.mark.parametrize(
    "number", [1 << 63, -(1 << 63) - 1, 1 << 128, -(1 << 40000)], ids=int.bit_length
)
def test_integers_beyond_64_bits_become_text(number: int) -> None:
    assert decode(encode_attributes({"n": number}, ROOM)) == [("n", hex(number))]


class Colour(enum.IntEnum):
    RED = 3


class Name(str):
    __slots__ = ()


def test_subclasses_count_as_what_they_are() -> None:
    attributes: dict[str, AttributeValue] = {Name("n"): Name("text"), "colour": Colour.RED}
    assert typed(decode(encode_attributes(attributes, ROOM))) == [
        ("n", "str", "text"),
        ("colour", "int", 3),
    ]


def test_text_that_utf8_cannot_hold_is_kept_but_for_those_characters() -> None:
    assert decode(encode_attributes({"a\ud800": "b\udfff"}, ROOM)) == [("a?", "b?")]


@pytest.mark.parametrize("attributes", [{"a": None}, {"a": [1]}, {"a": {"b": 1}}, {1: "a"}])
def test_other_types_are_mistakes(attributes: dict[str, AttributeValue]) -> None:
    with pytest.raises(TypeError, match="attribute"):
        encode_attributes(attributes, ROOM)


@given(st.text(), st.integers(0, 50))
def test_cutting_keeps_whole_characters_and_as_many_as_fit(text: str, size: int) -> None:
    cut = cut_utf8(text.encode(), size).decode()
    assert text.startswith(cut)
    assert len(cut.encode()) <= size
    if cut != text:
        assert len(text[: len(cut) + 1].encode()) > size
