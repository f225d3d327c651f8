# SPDX-License-Identifier: Apache-2.0
"""What who may not ask is told: by gRPC's clients it is read as if gRPC had said it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from coordinator.rpc import refusal
from coordinator.rpc.refusal import refuse

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, ACK = (bytes((0, 0, 0, 4, flags, 0, 0, 0, 0)) for flags in (0, 1))


@contextlib.asynccontextmanager
async def refusing(path: Path, reason: str) -> AsyncIterator[list[str]]:
    """Refuse all who come; what is added says who has been."""
    done: list[str] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await refuse(reader, writer, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
            done.append("refused")
        finally:
            writer.close()

    async with await asyncio.start_unix_server(meet, path):
        yield done


@pytest.mark.parametrize(
    "reason", ["", "no", '100 % of „all"\n', "x" * 127, "y" * 126 + "%", "z" * 5000]
)
def test_each_way_to_call_reads_the_reason(tmp_path: Path, reason: str) -> None:
    async def run() -> None:
        async with (
            refusing(tmp_path / "s", reason) as done,
            grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel,
        ):
            single = channel.unary_unary("/x/y", None, None)(bytes(100_000))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await single
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == reason
            listing = channel.unary_stream("/x/y", None, None)(bytes(100_000))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await listing.read()
            assert caught.value.details() == reason
            streams = channel.stream_stream("/x/y", None, None)(None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await streams.read()
            assert caught.value.details() == reason
            assert not done  # all on one connection

    asyncio.run(run())


async def answer(path: Path, said: bytes) -> bytes:
    """All that comes back; who asks does not hang up."""

    def ask() -> bytes:
        received = bytearray()
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(str(path))
            with contextlib.suppress(ConnectionError):  # it is not read
                asking.sendall(said)
            with contextlib.suppress(ConnectionError):
                while data := asking.recv(1 << 16):
                    received += data
        return bytes(received)

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE + bytes((255, 255, 255, 4, 0, 0, 0, 0, 0)) + bytes(1 << 20),
        PREFACE + SETTINGS * 20_000,
    ],
    ids=["another protocol", "a long frame", "many frames"],
)
def test_who_does_not_call_is_left(tmp_path: Path, said: bytes) -> None:
    async def run() -> None:
        async with refusing(tmp_path / "s", "no"), asyncio.timeout(refusal._PATIENCE_S / 2):
            assert (await answer(tmp_path / "s", said)).replace(ACK, b"") == SETTINGS

    asyncio.run(run())


@pytest.mark.parametrize("said", [b"", PREFACE[:5], PREFACE + SETTINGS])
def test_nobody_is_waited_for_for_long(
    tmp_path: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal, "_PATIENCE_S", 0.05)

    async def run() -> None:
        async with refusing(tmp_path / "s", "no"), asyncio.timeout(30):
            assert (await answer(tmp_path / "s", said)).replace(ACK, b"") == SETTINGS

    asyncio.run(run())


def test_who_never_ends_his_question_is_left(tmp_path: Path) -> None:
    call = bytes((0, 0, 0, 1, 4, 0, 0, 0, 1))
    data = bytes((0, 64, 0, 0, 0, 0, 0, 0, 1)) + bytes(1 << 14)

    async def run() -> None:
        async with refusing(tmp_path / "s", "no"), asyncio.timeout(refusal._PATIENCE_S / 2):
            said = await answer(tmp_path / "s", PREFACE + SETTINGS + call + data * 100)
            assert b"grpc-message\x02no" in said

    asyncio.run(run())
