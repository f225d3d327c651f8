# SPDX-License-Identifier: Apache-2.0
"""Assembly: slices are the concatenation of their chunks, durable before acknowledged, bounded."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.coordinator import CoordinatorConfig
from coordinator.core.credit import ADVANCE_BYTES, QUANTUM_BYTES, Credit
from coordinator.core.records import AppendSlice
from protocol.messages import CHUNK_BYTES_MAX, Abandoned, SliceAck, SliceChunk, SliceReply
from tests.unit.coordinator_harness import Harness, S, trace_id, two_nodes

T = trace_id("T")
U = trace_id("U")
MIB = 1 << 20


def stored(harness: Harness, name: str) -> bytes:
    return bytes(harness.store.traces[T].slices[name].data)


def acked(harness: Harness, name: str) -> int:
    """The last offset that the node was told is durable."""
    offsets = [ack.offset for to, reply in harness.replied for ack in reply.acks if to == name]
    return offsets[-1] if offsets else 0


def test_a_frame_is_written_with_a_chunk_that_is_new_as_a_whole() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.autosave = False
    for offset, data in ((0, b"abcdef"), (3, b"defghi"), (9, b"jkl")):
        harness.send("n1", T, offset, data)
    appended = [w.record for w in harness.written if isinstance(w.record, AppendSlice)]
    assert [record.data for record in appended] == [b"abcdef", b"ghi", b"jkl"]
    assert [bool(record.zstd) for record in appended] == [True, False, True]


@settings(max_examples=150)
@given(
    data=st.binary(min_size=1, max_size=300),
    chunks=st.lists(st.tuples(st.integers(0, 320), st.integers(1, 120)), max_size=30),
    rng=st.randoms(use_true_random=False),
)
def test_any_chunks_make_the_slice(
    data: bytes, chunks: list[tuple[int, int]], rng: random.Random
) -> None:
    """Cut, overlapping, repeated, out of order, over new streams and restarts."""
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.autosave = False
    for offset, size in chunks:
        if data[offset : offset + size]:
            harness.send("n1", T, offset, data[offset : offset + size])
        match rng.randrange(8):
            case 0:
                harness.lose_slices("n1")
                harness.open_slices("n1")
            case 1:
                harness.save()
            case 2 if harness.written:
                harness.save(rng.choice(harness.written).token)
            case 3:
                harness.restart()
                harness.connect("n1")
                harness.open_slices("n1")
        kept = harness.store.traces.get(T)
        if kept is not None and "n1" in kept.slices:
            assert data.startswith(bytes(kept.slices["n1"].data))
    # The node goes on from where it was told, and in the end all is there.
    harness.lose_slices("n1")
    harness.save()
    harness.replied.clear()
    harness.open_slices("n1")
    offset = acked(harness, "n1")
    while offset < len(data):
        harness.send("n1", T, offset, data[offset : offset + 50])
        offset += 50
    harness.save()
    assert stored(harness, "n1") == data
    assert acked(harness, "n1") == len(data)
    assert harness.core.counters.chunks_over_credit == 0


def test_a_gap_is_answered_with_where_to_go_on() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.send("n1", T, 0, b"abcd")
    harness.replied.clear()
    harness.send("n1", T, 8, b"ijkl")
    assert stored(harness, "n1") == b"abcd"
    assert acked(harness, "n1") == 4
    assert harness.core.counters.chunks_with_gap == 1


def test_a_new_stream_says_what_the_old_one_may_not_have() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 4)
    harness.send("n1", T, 0, b"abcd")
    for expected in (4, 0):
        # The ack may have been lost with the first stream, but not with the one before.
        harness.lose_slices("n1")
        harness.replied.clear()
        harness.open_slices("n1")
        if expected:
            assert acked(harness, "n1") == expected
            harness.lose_slices("n1")
            harness.open_slices("n1")
        harness.replied.clear()
    # Bytes that are due are told on each.
    harness.status("n1", T, 8)
    harness.lose_slices("n1")
    harness.open_slices("n1")
    assert acked(harness, "n1") == 4


def test_a_stream_may_send_once_its_node_has_said_hello() -> None:
    harness = Harness()
    harness.open_slices("n1", 7)
    assert harness.credit["n1"] == 0
    harness.send("n1", T, 0, b"abcd")
    assert harness.core.counters.chunks_unwelcome == 1
    harness.connect("n1", 6)  # another process of that name
    assert harness.credit["n1"] == -4
    harness.lose("n1")
    harness.connect("n1", 7)
    assert harness.credit["n1"] > 0


def test_credit_is_topped_up_in_few_messages() -> None:
    harness = Harness(CoordinatorConfig(credit_window_bytes=MIB))
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 64 * 65536)
    harness.replied.clear()
    for number in range(64):
        harness.send("n1", T, number * 65536, bytes(65536))
    granted = [reply.credit_bytes for _, reply in harness.replied if reply.credit_bytes]
    assert sum(granted) >= 63 * 65536
    # Small ones at first, then half a window each.
    assert len(granted) <= 8 + 4


# ------------------------------------------------------------------ memory


@settings(max_examples=60)
@given(
    nodes=st.integers(1, 12),
    memory=st.integers(MIB, 4 * MIB),
    window=st.integers(1000, 2 * MIB),
    seed=st.integers(0, 2**32),
)
def test_what_is_not_durable_fits_in_memory_and_nobody_starves(
    nodes: int, memory: int, window: int, seed: int
) -> None:
    """The harness checks the bound after each step; here all bytes must get through."""
    rng = random.Random(seed)
    harness = Harness(CoordinatorConfig(memory_bytes=memory, credit_window_bytes=window))
    harness.autosave = False
    names = [f"n{number}" for number in range(nodes)]
    harness.cluster(*names)
    harness.fire("n0", T)
    left = {name: rng.randrange(1, MIB) for name in names}
    for name in names:
        # Not always: what is written since comes without a word.
        if rng.random() < 0.8:
            harness.status(name, T, left[name])
    sent = dict.fromkeys(names, 0)
    idle = 0
    while any(left.values()):
        able = [name for name in names if left[name] and harness.credit[name]]
        if not able or rng.random() < 0.1:
            idle = idle + 1 if not able else 0
            assert idle < 3, "credit never comes"
            harness.save()
            continue
        name = rng.choice(able)
        size = min(left[name], harness.credit[name], rng.randrange(1, 65536))
        harness.send(name, T, sent[name], bytes(size))
        sent[name] += size
        left[name] -= size
        if not left[name]:
            # Done: the shell closes the stream, and its credit goes to others.
            harness.lose_slices(name)
    harness.save()
    assert harness.core.counters.chunks_over_credit == 0
    assert {name: len(stored(harness, name)) for name in names} == sent


def test_who_sends_more_than_it_may_costs_only_itself() -> None:
    harness = Harness(CoordinatorConfig(memory_bytes=MIB, credit_window_bytes=MIB))
    harness.autosave = False
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    may = harness.credit["n2"]
    for number in range(40):
        harness.send("n1", T, number * 65536, bytes(65536))
    assert harness.core.counters.chunks_over_credit > 0
    harness.send("n2", T, 0, bytes(may))
    harness.save()
    assert len(stored(harness, "n2")) == may


def told(credit: Credit) -> dict[int, int]:
    """What streams are told that they may send more."""
    return {stream: credit.take_grant(stream) for stream in credit.take_news()}


def test_credit_of_streams_that_close_goes_to_those_that_wait() -> None:
    credit = Credit(4 * QUANTUM_BYTES, 4 * QUANTUM_BYTES)
    for stream in range(8):
        credit.open(stream)
    told(credit)
    for stream in range(8):
        credit.demand(stream, 1 << 30)
    granted = told(credit)
    assert sum(granted.values()) <= 4 * QUANTUM_BYTES
    waiting = [stream for stream in range(8) if stream not in granted]
    assert waiting
    assert credit.waiting == len(waiting)
    for stream in list(granted):
        credit.close(stream)
    served = list(told(credit))
    assert served
    assert served == waiting[: len(served)]


def test_no_node_hoards_credit_by_many_streams() -> None:
    harness = Harness(CoordinatorConfig(memory_bytes=MIB))
    harness.connect("many")
    for _ in range(300):
        harness.open_slices("many")
    harness.connect("one")
    harness.open_slices("one")
    assert harness.credit["one"] == harness.credit["many"] > 0


def test_credit_of_a_stream_that_is_lost_is_there_for_the_next() -> None:
    harness = Harness(CoordinatorConfig(memory_bytes=MIB, credit_window_bytes=MIB))
    harness.cluster("n1")
    granted = harness.credit["n1"]
    for _ in range(10):
        harness.lose_slices("n1")
        harness.open_slices("n1")
        assert harness.core.memory_bytes == harness.credit["n1"] == granted


def test_bytes_that_are_not_kept_cost_no_credit() -> None:
    """Repeated, behind a gap, of a slice that was given up: the stream may send as much again."""
    harness = Harness(CoordinatorConfig(memory_bytes=MIB, credit_window_bytes=65536))
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 100 * 65536, epoch=2)
    harness.send("n1", T, 0, bytes(1000), epoch=2)
    for _ in range(100):
        harness.send("n1", T, 0, bytes(1000), epoch=2)
        harness.send("n1", T, 9000, bytes(32000), epoch=2)
        harness.send("n1", T, 500, bytes(1000), epoch=1)
    assert harness.core.counters.chunks_over_credit == 0
    assert harness.credit["n1"] > 65536 // 2


def test_a_slow_store_stops_the_credit() -> None:
    harness = Harness(CoordinatorConfig(memory_bytes=CHUNK_BYTES_MAX, credit_window_bytes=65536))
    harness.autosave = False
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 2 * CHUNK_BYTES_MAX)
    sent = 0
    while harness.credit["n1"]:
        size = harness.credit["n1"]
        harness.send("n1", T, sent, bytes(size))
        sent += size
    assert sent <= CHUNK_BYTES_MAX
    assert sent > CHUNK_BYTES_MAX - 2 * 65536
    harness.save()
    assert list(harness.credit.values()) == [ADVANCE_BYTES + 65536]


def test_nodes_with_nothing_to_send_hold_no_credit_that_others_need() -> None:
    """However many they are, and whoever came first."""
    many = 2000
    harness = Harness(CoordinatorConfig(memory_bytes=16 * MIB, credit_window_bytes=MIB))
    for number in range(many):
        harness.connect(f"idle-{number}")
        harness.open_slices(f"idle-{number}")
    assert harness.core.memory_bytes < 16 * MIB / 2
    harness.cluster("busy")
    harness.fire("busy", T)
    data = bytes(4 * MIB)
    harness.status("busy", T, len(data))
    sent = 0
    while sent < len(data):
        size = min(len(data) - sent, harness.credit["busy"])
        assert size > 0, "it waits for those that have nothing to send"
        harness.send("busy", T, sent, data[sent : sent + size])
        sent += size
    assert stored(harness, "busy") == data
    assert harness.core.figures().streams_waiting == 0
    # As little as it had before.
    assert harness.credit["busy"] <= 2 * ADVANCE_BYTES


def test_a_node_that_does_not_send_what_it_has_holds_little() -> None:
    harness = Harness(CoordinatorConfig(memory_bytes=16 * MIB, credit_window_bytes=4 * MIB))
    names = [f"slow-{number}" for number in range(100)]
    harness.cluster(*names, "busy")
    for name in names:
        harness.fire(name, T)
        harness.status(name, T, 1 << 30)
    assert all(0 < harness.credit[name] <= ADVANCE_BYTES + QUANTUM_BYTES for name in names)
    harness.fire("busy", T)
    harness.status("busy", T, 1 << 30)
    for number in range(64):
        harness.send("busy", T, number * 65536, bytes(65536))
    assert harness.core.counters.chunks_over_credit == 0
    assert harness.credit["busy"] > 4 * QUANTUM_BYTES


def test_who_comes_new_finds_credit_beside_busy_streams() -> None:
    """While nothing becomes durable, too."""
    harness = Harness(CoordinatorConfig(memory_bytes=2 * MIB, credit_window_bytes=4 * MIB))
    harness.cluster("busy", "new")
    harness.fire("busy", T)
    harness.status("busy", T, 1 << 30)
    # It sends as much as it may, until it gets no more at a time.
    for number in range(16 * MIB // 65536):
        harness.send("busy", T, number * 65536, bytes(65536))
    harness.autosave = False
    harness.fire("new", U)
    harness.status("new", U, 1 << 30)
    assert harness.credit["new"] >= ADVANCE_BYTES + QUANTUM_BYTES


def test_credit_comes_back_from_what_nobody_wants_any_more() -> None:
    harness = Harness()
    harness.cluster("n1")
    group = harness.fire("n1", T)
    harness.status("n1", T, 1 << 30)
    assert harness.credit["n1"] > ADVANCE_BYTES
    harness.say("n1", Abandoned(group))
    harness.send("n1", U, 0, bytes(harness.credit["n1"]))
    assert harness.credit["n1"] <= ADVANCE_BYTES


# ------------------------------------------------------- the order of things


@settings(max_examples=150)
@given(st.randoms(use_true_random=False))
def test_acknowledgements_follow_durability_and_versions_rise(rng: random.Random) -> None:
    """A random life of two nodes and their slices; the harness checks each output."""
    harness = Harness()
    slices = two_nodes()
    names = list(slices)
    harness.cluster(*names)
    harness.autosave = False
    sent = dict.fromkeys(names, 0)
    for _ in range(60):
        name = rng.choice(names)
        data = slices[name]
        match rng.randrange(10):
            case 0:
                harness.fire(name, T, rng.choice(("ta", "tb")))
            case 1 | 2:
                size = rng.randrange(len(data) + 1)
                harness.status(name, T, size, [other for other in names if other != name])
            case 3 | 4 | 5:
                size = rng.randrange(1, 200)
                harness.send(name, T, sent[name], data[sent[name] : sent[name] + size] or b"x")
                sent[name] = min(len(data), sent[name] + size)
            case 6:
                harness.wait(rng.choice((S // 10, S, 20 * S, 400 * S)))
            case 7 if harness.written:
                harness.save(rng.choice(harness.written).token)
            case 8:
                harness.lose_slices(name)
                harness.open_slices(name)
                sent[name] = rng.randrange(len(data))
            case 9 if rng.random() < 0.3:
                harness.restart()
                for other in names:
                    harness.connect(other)
                    harness.open_slices(other)
    harness.save()
    versions = [verdict.version for verdict in harness.verdicts.get(T, [])]
    assert versions == sorted(set(versions))


def test_one_reply_a_stream_carries_all_acks() -> None:
    harness = Harness()
    harness.autosave = False
    harness.cluster("n1")
    traces = [trace_id(f"T{number}") for number in range(50)]
    for trace in traces:
        harness.fire("n1", trace)
        harness.send("n1", trace, 0, b"x" * 8)
    harness.replied.clear()
    harness.save()
    (reply,) = [reply for _, reply in harness.replied]
    assert isinstance(reply, SliceReply)
    assert {ack.trace for ack in reply.acks} == set(traces)


def test_nothing_is_acknowledged_to_a_node_that_never_had_any() -> None:
    """What came late reopens a trace with all its nodes; an ack of no slice fits no wire."""
    harness = Harness()
    harness.cluster("n1", "n2")
    harness.fire("n1", T)
    harness.status("n1", T, 10, ["n2"])
    harness.status("n2", T, epoch=0)
    harness.send("n1", T, 0, bytes(10))
    harness.wait(harness.config.missing_linger_ns + 2 * harness.config.linger_ns)
    harness.replied.clear()
    harness.send("n1", T, 10, bytes(10))
    assert {name: [ack.offset for ack in reply.acks] for name, reply in harness.replied} == {
        "n1": [20]
    }


def test_a_chunk_with_what_is_said_counts_by_the_stream_that_it_names() -> None:
    harness = Harness()
    harness.cluster("n1")
    harness.open_slices("n1", number=7)
    harness.fire("n1", T)
    harness.status("n1", T, 200)
    for stream, offset, count in ((6, 0, 50), (7, 0, 100), (8, 100, 100), (7, 100, 100)):
        chunk = SliceChunk(T, offset, bytes(count), 1, stream=stream)
        if stream == 7:
            harness.sent["n1", T, 1] = offset + count
            harness.credit["n1"] -= count
        harness.say("n1", chunk)
    harness.save()
    assert stored(harness, "n1") == bytes(200)
    assert harness.core.counters.chunks_unwelcome == 2
    harness.lose_slices("n1")
    harness.say("n1", SliceChunk(T, 0, bytes(100), 1, stream=7))
    assert harness.core.counters.chunks_unwelcome == 3


def test_what_overtook_the_rest_is_sent_again() -> None:
    """A chunk on the Control stream overtakes those before it on the Slices stream."""
    harness = Harness()
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 30)
    harness.replied.clear()
    harness.send("n1", T, 20, bytes(10))
    assert harness.replied == [("n1", SliceReply((SliceAck(T, 0, 1, again=True),)))]
    harness.replied.clear()
    harness.send("n1", T, 0, bytes(20))
    assert [ack for _, reply in harness.replied for ack in reply.acks] == [SliceAck(T, 20, 1)]
    harness.send("n1", T, 20, bytes(10))
    harness.save()
    assert stored(harness, "n1") == bytes(30)


def test_what_overtook_the_beginning_of_a_later_slice_is_sent_again() -> None:
    harness = Harness(patience_ns=5 * S)
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.send("n1", T, 0, bytes(20))
    harness.status("n1", T, 50)
    harness.replied.clear()
    harness.send("n1", T, 20, bytes(10), epoch=2)
    # At once, with what was put off.
    acks = (SliceAck(T, 20, 1), SliceAck(T, 0, 2, again=True))
    assert harness.replied == [("n1", SliceReply(acks))]


def test_what_becomes_durable_meanwhile_takes_no_wish_back() -> None:
    harness = Harness(patience_ns=5 * S)
    harness.cluster("n1")
    harness.fire("n1", T)
    harness.status("n1", T, 30)
    harness.send("n1", T, 0, bytes(10))
    harness.replied.clear()
    harness.autosave = False
    harness.core.on_chunk(harness.streams["n1"], SliceChunk(T, 20, bytes(10), 1), harness.now_ns)
    harness.core.on_durable(harness.written[-1].token if harness.written else 0, harness.now_ns)
    harness.credit["n1"] -= 10
    harness.fetch()
    assert harness.replied == [("n1", SliceReply((SliceAck(T, 10, 1, again=True),)))]
