# SPDX-License-Identifier: Apache-2.0
"""Slices at random: what may be written, and what nobody would write."""

from __future__ import annotations

import string

import msgpack
from hypothesis import strategies as st

from formats.records import (
    Body,
    Breadcrumb,
    Data,
    HopIn,
    HopOut,
    ResourceRecord,
    ScopeRecord,
    SpanDetail,
    SpanEnd,
    SpanStart,
    Unanswered,
)
from formats.slices import PieceKind, Process, RunFlags
from protocol.hashing import node_id
from protocol.kernel_events import KernelEvent, Kind
from protocol.messages import NodeId
from testbed.encoding import (
    encode_attributes,
    encode_clock,
    encode_piece,
    encode_process,
    encode_record,
)

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
U16 = st.integers(0, 2**16 - 1)
NAMES = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)

ATTRIBUTES = st.dictionaries(
    NAMES,
    st.one_of(
        NAMES,
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.booleans(),
        st.binary(max_size=16),
    ),
    max_size=4,
)

WORDS = st.text(string.ascii_letters, max_size=15)

# In place of the name of another process there is an address, or a disk.
_OF_NO_PROCESS = {kind for kind in Kind if kind.is_tcp} | {Kind.IO_WAIT}

KERNEL_EVENTS = st.builds(
    KernelEvent,
    U64,
    U64,
    U32,
    U32,
    U16.filter(lambda kind: kind not in _OF_NO_PROCESS),
    U16,
    st.none() | st.integers(0, 511),
    U32,
    U64,
    WORDS,
    WORDS,
)

BODIES: st.SearchStrategy[Body] = st.one_of(
    st.builds(Data, st.just(1), st.binary(max_size=40)),
    st.builds(SpanStart, U64, U64, U64, st.integers(0, 5), NAMES),
    st.builds(SpanEnd, U64, U64, st.integers(0, 2), NAMES, ATTRIBUTES.map(encode_attributes)),
    st.builds(HopOut, U64.map(NodeId), U64, U32, U32),
    st.builds(HopIn, U64.map(NodeId), U64, U32, U32),
    st.builds(Breadcrumb, U64.map(NodeId), NAMES),
    st.builds(Unanswered, U64, NAMES, NAMES, st.booleans()),
    KERNEL_EVENTS,
)

ALL_RUN = RunFlags.FIRST | RunFlags.LAST


# Seldom many, so that much is said of the same.
CLIENTS = st.integers(1, 3) | st.integers(1, 40)
STARTS = st.just(0) | st.integers(0, 12).map(lambda number: 4 * number) | U32


@st.composite
def pieces(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(PieceKind))
    client = draw(CLIENTS)
    if kind is PieceKind.CLOCK:
        return encode_clock(draw(U64), draw(U64), draw(st.integers(1, 2**64 - 1)))
    if kind is PieceKind.PROCESS:
        return encode_process(client, Process(draw(U32), draw(st.sampled_from(["a", "été"]))))
    if kind is not PieceKind.RUN:
        return encode_piece(kind, client=client)
    content = b"".join(
        encode_record(body, draw(U64)) for body in draw(st.lists(BODIES, max_size=4))
    )
    return encode_piece(
        kind,
        content,
        flags=RunFlags(draw(st.integers(0, 7))),
        client=client,
        handle=draw(st.integers(0, 3)),
        seq=draw(st.integers(0, 3)),
        start=draw(STARTS),
    )


SLICES = st.lists(pieces(), max_size=6).map(b"".join)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A slice with a few bytes changed, left out or put in."""
    data = bytearray(draw(SLICES))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        kept = draw(st.sampled_from([0, 1, 4]))
        data[at : at + kept] = draw(st.binary(max_size=4) | st.just(b"\xff" * 4))
    return bytes(data)


ANY_BYTES = st.one_of(
    SLICES, mutated(), st.lists(st.binary(max_size=60) | SLICES, max_size=4).map(b"".join)
)


@st.composite
def cut_up(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The same bytes in chunks of any size."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[at:to] for at, to in zip([0, *cuts], [*cuts, len(data)], strict=True)]


# ---------------------------------------------------------------- of a trace

NODES = [node_id(name) for name in ("n1", "n2", "@192.0.2.7", "@fe80::1%x")]

# So few that they meet.
FEW = st.integers(0, 5)
MET_NAMES = st.sampled_from(["n1", "n2", "@192.0.2.7", "@fe80::1%x", "", "another"])
HOPS = (st.sampled_from(NODES), FEW, st.integers(0, 2), st.integers(1, 2))
MET_BODIES: st.SearchStrategy[Body] = st.one_of(
    st.builds(SpanStart, FEW, FEW, FEW, st.just(1), NAMES),
    st.builds(SpanEnd, FEW, FEW, st.just(0), st.just(""), st.just(b"")),
    st.builds(HopOut, *HOPS),
    st.builds(HopIn, *HOPS),
    st.builds(Breadcrumb, st.sampled_from(NODES), MET_NAMES),
    st.builds(Unanswered, FEW, MET_NAMES.map(lambda name: name[1:]), NAMES, st.booleans()),
    st.just(Data(1, b"x")),
)


@st.composite
def runs(draw: st.DrawFn) -> bytes:
    """Spans, hops and crumbs that concern each other."""
    bodies = draw(st.lists(st.tuples(MET_BODIES, st.booleans()), max_size=6))
    return encode_piece(
        PieceKind.RUN,
        b"".join(encode_record(body, 0, truncated=cut) for body, cut in bodies),
        flags=RunFlags(draw(st.integers(0, 15))),
        client=draw(st.integers(1, 2)),
        handle=draw(st.integers(1, 3)),
        seq=draw(st.integers(0, 2)),
    )


MET_SLICES = st.lists(runs() | runs() | pieces(), max_size=6).map(b"".join)


# ----------------------------------------------------------- what spans say

# What programs write, and what is near to it.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-200, 200),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e16, 1e21, 1e22, 1e-5, 0.0001, 123456789012345680.0, 5e-324]),
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=6),
    st.sampled_from(["x" * 256, "x" * 257, "\u00e4" * 256, "\u20ac" * 257, '"\\\n\x7f']),
    st.binary(max_size=5),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | SCALARS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["service.name", "a", "b", "backsight.trigger"]) | NAMES
MAPS = st.dictionaries(KEYS | KEYS | SCALARS, VALUES, max_size=5)
SAID_TIMES = st.sampled_from([0, 1, 10**18, 2**63, 2**64 - 1]) | st.integers(10**18, 10**18 + 99)
EVENTS = st.lists(st.tuples(NAMES, SAID_TIMES, MAPS, FEW) | SCALARS, max_size=3)
LINKS = st.lists(
    st.tuples(st.binary(min_size=16, max_size=16), U64, MAPS, NAMES, U32, FEW), max_size=2
)
DETAILS = st.tuples(MAPS, EVENTS, LINKS, NAMES, NAMES, U64, FEW, FEW, FEW, NAMES)


def packed(said: object) -> bytes:
    return bytes(msgpack.packb(said))


@st.composite
def twice(draw: st.DrawFn) -> bytes:
    """A map in which keys come again."""
    keys = draw(
        st.lists(st.sampled_from([b"\xa1a", b"\xa1b", b"\xa1\xff", b"\x01", b"\xc3"]), max_size=24)
    )
    pairs = b"".join(key + packed(draw(VALUES)) for key in keys)
    return b"\x91\xde" + len(keys).to_bytes(2, "big") + pairs


MSGPACK = st.one_of(
    st.lists(VALUES | MAPS, max_size=4).map(packed),
    twice(),
    st.binary(max_size=12),
    st.builds(lambda said, cut: said[:cut], DETAILS.map(packed), st.integers(0, 60)),
)
CLEAN_ATTRIBUTES = ATTRIBUTES.map(encode_attributes)


@st.composite
def details(draw: st.DrawFn) -> list[SpanDetail]:
    """Of one span id, in one part or some, of which one may be missing."""
    encoded = draw(DETAILS.map(packed) | MSGPACK)
    count, span_id, scope = draw(st.integers(1, 3)), draw(FEW), draw(st.integers(0, 2))
    size = -(-len(encoded) // count)
    parts = [
        SpanDetail(span_id, scope, part, count, encoded[part * size : (part + 1) * size])
        for part in range(count)
    ]
    return parts[: draw(st.sampled_from([count, count, count, count - 1]))]


SAID: st.SearchStrategy[list[Body]] = st.one_of(
    st.builds(SpanStart, FEW, FEW, SAID_TIMES, st.integers(0, 6), NAMES).map(lambda body: [body]),
    st.builds(SpanStart, FEW, FEW, SAID_TIMES, st.integers(0, 6), NAMES).map(lambda body: [body]),
    st.builds(
        SpanEnd,
        FEW,
        SAID_TIMES,
        FEW,
        NAMES,
        st.just(b"") | CLEAN_ATTRIBUTES | st.binary(max_size=20),
    ).map(lambda body: [body]),
    details(),
    details(),
    MSGPACK.map(lambda encoded: [ResourceRecord(encoded)]),
    st.builds(lambda said, url: [ResourceRecord(packed([said, url]))], MAPS, NAMES),
    st.builds(
        lambda number, said: [ScopeRecord(number, said)],
        st.integers(0, 2),
        MSGPACK | st.tuples(NAMES, NAMES, NAMES, MAPS).map(packed),
    ),
    KERNEL_EVENTS.map(lambda body: [body]),
    MET_BODIES.map(lambda body: [body]),
)


@st.composite
def said_slices(draw: st.DrawFn) -> bytes:
    """Spans with all that may be said of them."""
    found = [encode_clock(10**9, 10**18, 10**9)] if draw(st.booleans()) else []
    for client in draw(st.lists(st.integers(1, 3), max_size=2)):
        service = draw(st.sampled_from(["shop", "", "\u00e9t\u00e9"]))
        found.append(encode_process(client, Process(client, service)))
    for _ in range(draw(st.integers(1, 3))):
        bodies = [body for bodies in draw(st.lists(SAID, max_size=6)) for body in bodies]
        ticks = draw(st.lists(st.sampled_from([0, 10**9, 10**9 + 50]), min_size=1, max_size=3))
        content = b"".join(
            encode_record(body, ticks[number % len(ticks)]) for number, body in enumerate(bodies)
        )
        found.append(
            encode_piece(
                PieceKind.RUN,
                content,
                flags=RunFlags.FIRST | RunFlags.LAST,
                client=draw(st.integers(1, 3)),
                handle=draw(st.integers(1, 2)),
            )
        )
    return b"".join(found)
