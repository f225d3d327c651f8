# SPDX-License-Identifier: Apache-2.0
"""Whatever a process sends to attach is understood or refused in words, and never raises."""

from __future__ import annotations

import asyncio
import errno
import struct

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.packets import (
    ABI_MAGIC,
    ABI_OLDEST,
    ABI_VERSION,
    NEWS_CONTEXT,
    AttachRefused,
    pack_news,
    pack_refusal,
    parse_answer,
    parse_request,
)
from tests.unit.attach_harness import Peer, another_turn, close_fds, node, open_directory, request

REFUSAL_BYTES = 168  # of any version
SERVICE_OFFSET = struct.calcsize("=IIIiQ2Q")


@st.composite
def packets(draw: st.DrawFn) -> bytes:
    """Anything, or a request of which some bytes are others, are missing or are too many."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.binary(min_size=1, max_size=200))
    packet = bytearray(request())
    version = st.integers(0, 4) | st.integers(0, 2**32 - 1)
    struct.pack_into("=II", packet, 4, draw(version), draw(version))
    service = draw(st.binary(max_size=64))
    packet[SERVICE_OFFSET : SERVICE_OFFSET + len(service)] = service
    for at in draw(st.lists(st.integers(0, len(packet) - 1), max_size=4)):
        packet[at] = draw(st.integers(0, 255))
    end = draw(st.just(len(packet)) | st.integers(1, len(packet)))
    return bytes(packet[:end]) + draw(st.just(b"") | st.binary(max_size=300))


@settings(max_examples=1000, deadline=None)
@given(packets())
def test_a_request_is_understood_or_refused_in_words(packet: bytes) -> None:
    try:
        found = parse_request(packet)
    except AttachRefused as refused:
        assert refused.status in (errno.EPROTO, errno.EPROTONOSUPPORT)
        answer = pack_refusal(refused)
        assert len(answer) == REFUSAL_BYTES
        assert refused.message.startswith(answer[40:].rstrip(b"\0").decode())
        return
    magic, newest, oldest = struct.unpack_from("=III", packet)
    assert magic == ABI_MAGIC
    assert newest >= ABI_OLDEST
    assert oldest <= ABI_VERSION
    assert found.abi.is_spoken
    assert found.abi.version <= newest
    assert found.service.isprintable()
    assert found.service
    assert found.token is None or (len(found.token) == 16 and any(found.token))


@settings(max_examples=1000, deadline=None)
@given(st.binary(max_size=40) | st.integers(0, 2**64 - 1))
def test_an_answer_names_a_context_or_says_nothing(said: bytes | int) -> None:
    if isinstance(said, int):
        assert parse_answer(pack_news(NEWS_CONTEXT, said)) == said
        return
    number = parse_answer(said)
    assert number is None or said.startswith(pack_news(NEWS_CONTEXT, number))


@settings(max_examples=40, deadline=None)
@given(st.lists(packets(), min_size=1, max_size=8), st.lists(st.binary(min_size=1, max_size=40)))
def test_the_next_one_is_served(asked: list[bytes], said: list[bytes]) -> None:
    """Each is answered once; what an attached one says beyond that ends it at most."""

    async def run() -> None:
        with open_directory() as directory:
            async with node(directory) as here:
                for packet in asked:
                    peer = Peer.at(here.path)
                    reply = await peer.ask(packet)
                    assert (reply.status == 0) == bool(reply.fds)
                    assert bool(reply.message) == (reply.status != 0)
                    close_fds(reply)
                    for more in said if reply.status == 0 else ():
                        try:
                            peer.socket.send(more)
                        except OSError:
                            break
                        await another_turn()
                    peer.close()
                honest = Peer.at(here.path)
                reply = await honest.ask(request())
                assert reply.status == 0
                close_fds(reply)
                honest.close()
                counters = here.server.counters
                refused = counters.malformed + counters.other_version
                assert counters.attached + refused >= len(asked) + 1

    asyncio.run(run())
