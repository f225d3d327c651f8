# SPDX-License-Identifier: Apache-2.0
"""The data plane as Python sees it: every call is there, and carries a slice."""

from __future__ import annotations

import importlib
import mmap
import os
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECOND_NS = 1_000_000_000
NOW_NS = 1000 * SECOND_NS
TRACE = (0x0AF7651916CD43DD, 0x8448EB211C80319C)

# abi/channel.h
CHANNEL_GRANTS_OFFSET = 4096
GRANT_ENTRIES_OFFSET = 128
GRANT_FRESH = 0x8000_0000

# abi/arena.h
SEGMENT_BYTES = 65536
SEGMENT_HEADER_BYTES = 64
FIRST_LAST = 3
CLOSED = 8


@pytest.fixture
def native() -> Any:
    return importlib.import_module("backsight_node_native")


@pytest.fixture
def node(native: Any) -> Iterator[Any]:
    config = native.ffi.new(
        "struct bsn_config *",
        {
            "node_name": b"node-a",
            "pool_bytes": 8 << 20,
            "arena_bytes": 4 << 20,
            "store_bytes": 1 << 20,
            "trace_bytes_max": 1 << 20,
            "percentage_threshold": 2**64 - 1,
            "reclaim_percent": 98,
            "clients_max": 4,
            "tombstones": 100,
            "ticks_per_s": SECOND_NS,
        },
    )
    out = native.ffi.new("struct bsn **")
    message = native.ffi.new("char[256]")
    assert native.lib.bsn_new(config, out, message, len(message)) == 0, native.ffi.string(message)
    yield out[0]
    native.lib.bsn_free(out[0])


def write_run(fds: Any, payload: bytes) -> None:
    """Do what a client does for one request, by abi.h."""
    arena_bytes = os.fstat(fds.arena).st_size
    channel_bytes = os.fstat(fds.channel).st_size
    with mmap.mmap(fds.arena, arena_bytes) as arena, mmap.mmap(fds.channel, channel_bytes) as ch:
        grant = CHANNEL_GRANTS_OFFSET + GRANT_ENTRIES_OFFSET
        segment, generation = struct.unpack_from("=II", ch, grant)
        struct.pack_into("=I", ch, CHANNEL_GRANTS_OFFSET + 64, 1)  # the tail: taken
        record = struct.pack("=HBBQ", len(payload), 1, 0, NOW_NS) + payload
        record += bytes(-len(record) % 4)
        start = (segment & ~GRANT_FRESH) * SEGMENT_BYTES
        mix = trace_mix(*TRACE)
        word = len(record) // 4 << 18 | mix & (1 << 18) - 1
        header = struct.pack("=QII", TRACE[0], word, 1)
        at = start + SEGMENT_HEADER_BYTES
        arena[at : at + len(header) + len(record)] = header + record
        entry = mix >> 18 << 18 | SEGMENT_HEADER_BYTES // 4 << 4 | FIRST_LAST | CLOSED
        struct.pack_into("=Q", arena, start + SEGMENT_BYTES - 8, entry)
        # Generation and state, slot and number of runs.
        struct.pack_into("=IIII", arena, start, generation, 0, 0, 1)


def trace_mix(hi: int, lo: int) -> int:
    """bs_trace_mix() of abi/arena.h."""
    mask = (1 << 64) - 1
    product = hi * 0x9E3779B97F4A7C15 & mask
    x = int.from_bytes(product.to_bytes(8, "little"), "big") ^ lo
    x = (x ^ x >> 32) * 0xFF51AFD7ED558CCD & mask
    return x ^ x >> 29


def test_every_function_of_the_header_is_there(native: Any, repository: Path) -> None:
    header = (repository / "native/src/node.h").read_text()
    functions = re.findall(r"^BSN_EXPORT [^(]*?\*?(bsn_\w+)\(", header, re.MULTILINE)
    assert len(functions) >= 20
    assert [name for name in functions if not hasattr(native.lib, name)] == []


def test_a_bad_configuration_names_its_field(native: Any) -> None:
    config = native.ffi.new("struct bsn_config *", {"node_name": b"a", "pool_bytes": 1})
    out = native.ffi.new("struct bsn **")
    message = native.ffi.new("char[256]")
    assert native.lib.bsn_new(config, out, message, len(message)) < 0
    assert b"pool_bytes" in native.ffi.string(message)


def test_a_slice_comes_back_as_bytes(native: Any, node: Any) -> None:
    ffi, lib = native.ffi, native.lib
    fds = ffi.new("struct bsn_client_fds *")
    client = lib.bsn_client_add(node, os.getpid(), b"service", NOW_NS, fds)
    assert client > 0
    write_run(fds, b"what happened")

    found = ffi.new("struct bsn_slice *")
    trace = {"hi": TRACE[0], "lo": TRACE[1]}
    assert lib.bsn_collect(node, trace, trace, b"slow", NOW_NS, found) == 0
    assert found.flags == lib.BSN_SLICE_HELD
    assert ffi.string(found.trigger) == b"slow"
    buffer = ffi.new("uint8_t[]", found.bytes)
    assert lib.bsn_slice_read(node, trace, 0, buffer, found.bytes) == found.bytes
    assert b"what happened" in bytes(buffer)

    # Whoever collects it was told all of it.
    assert lib.bsn_poll(node, NOW_NS) == 0
    assert lib.bsn_events(node, ffi.new("struct bsn_event[4]"), 4) == 0
    metrics = ffi.new("struct bsn_metrics *")
    lib.bsn_get_metrics(node, metrics)
    assert (metrics.corrupt, metrics.searches, metrics.slices) == (0, 1, 1)
    for fd in (fds.arena, fds.channel, fds.context):
        os.close(fd)


def test_waiting_lets_other_threads_run(native: Any, node: Any) -> None:
    # bsn_wait has no timeout here: it ends because this thread can wake it.
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(native.lib.bsn_wait(node, -1)))
    thread.start()
    native.lib.bsn_wake(node)
    thread.join()
    assert results == [1]
