# SPDX-License-Identifier: Apache-2.0
"""What becomes of a request on its way to an OTLP receiver, and that another thread ends it."""

from __future__ import annotations

import contextlib
import email.utils
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.otlp_export import transports
from coordinator.otlp_export.transports import (
    Accepted,
    HttpTransport,
    Outcome,
    Transport,
    TryAgain,
    transport_of,
)
from runtime.settings.coordinator import ExportSettings
from testbed.ports import free_port
from tests.export.receivers import HttpReceiver


@contextlib.contextmanager
def closing_transport(settings: ExportSettings) -> Iterator[Transport]:
    transport = transport_of(settings)
    try:
        yield transport
    finally:
        transport.close()


# ------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("scheme", "protocol", "port"),
    [
        ("http", "grpc", 4317),
        ("http", "http/protobuf", 4318),
        ("https", "grpc", 443),
        ("https", "http/protobuf", 443),
    ],
)
def test_where_a_url_without_a_port_leads(
    monkeypatch: pytest.MonkeyPatch, scheme: str, protocol: str, port: int
) -> None:
    asked: list[str] = []

    real = grpc.insecure_channel

    def channel(target: str, *_: object) -> grpc.Channel:
        asked.append(target)
        return real(target)

    monkeypatch.setattr(grpc, "secure_channel", channel)
    monkeypatch.setattr(grpc, "insecure_channel", channel)
    with closing_transport(ExportSettings(f"{scheme}://127.0.0.1", protocol)) as transport:
        if isinstance(transport, HttpTransport):
            asked.append(f"{transport._connection.host}:{transport._connection.port}")
    assert asked == [f"127.0.0.1:{port}"]


def test_a_file_of_certificates_that_is_not_there_is_named(tmp_path: Path) -> None:
    for protocol in ("grpc", "http/protobuf"):
        settings = ExportSettings("https://127.0.0.1:1", protocol, ca_file=str(tmp_path / "no.pem"))
        with pytest.raises(OSError, match=r"export\.ca_file: .*no\.pem: No such file"):
            transport_of(settings)


# --------------------------------------------------------------- interruption


def ends_when_interrupted(settings: ExportSettings, is_under_way: Callable[[Any], object]) -> bool:
    """Whether sending ends at once, although it may take minutes."""
    with closing_transport(settings) as transport:
        outcomes: queue.Queue[Outcome] = queue.Queue()
        threading.Thread(
            target=lambda: outcomes.put(transport.send(b"")), name="sends", daemon=True
        ).start()
        while not is_under_way(transport):
            pass
        transport.interrupt()
        return isinstance(outcomes.get(timeout=60), TryAgain) and isinstance(
            transport.send(b""), TryAgain
        )


def test_a_look_up_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        asked.set()
        answer.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    settings = ExportSettings("http://127.0.0.1:1", "http/protobuf", timeout_s=600)
    assert ends_when_interrupted(settings, lambda _: asked.wait(60))
    answer.set()


def test_connecting_is_interrupted() -> None:
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):  # one is in the queue, and nothing answers the others
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        settings = ExportSettings(url, "http/protobuf", timeout_s=600)
        assert ends_when_interrupted(
            settings,
            lambda _: any(thread.name == "connect" for thread in threading.enumerate()),
        )


def test_a_handshake_is_interrupted() -> None:
    with contextlib.ExitStack() as sockets:
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"

        def said_hello(_: object) -> bytes:
            return sockets.enter_context(silent.accept()[0]).recv(1)

        assert ends_when_interrupted(
            ExportSettings(url, "http/protobuf", timeout_s=600), said_hello
        )


def test_a_connection_that_goes_while_it_is_broken_off_is_no_failure() -> None:
    class Going(transports._Connection):
        """Has its socket once."""

        @property
        def _made(self) -> socket.socket | None:
            return sockets.pop() if sockets else None

        @_made.setter
        def _made(self, _: object) -> None: ...

    sockets: list[socket.socket] = []
    going = Going("127.0.0.1", 1, 600)
    with socket.socket() as here:
        sockets.append(here)
        going.break_off()


# ------------------------------------------------------------------- outcomes


def test_a_look_up_that_fails_somehow_is_a_try_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnicodeError("label empty or too long")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with closing_transport(ExportSettings("http://127.0.0.1:1", "http/protobuf")) as transport:
        assert transport.send(b"") == TryAgain("UnicodeError: label empty or too long")


def test_a_connection_that_comes_too_late_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    given_up = threading.Event()

    def connect(*_: object) -> socket.socket:
        given_up.wait(60)
        return here

    monkeypatch.setattr(socket, "create_connection", connect)
    with closing_transport(
        ExportSettings("http://127.0.0.1:1", "http/protobuf", timeout_s=0.1)
    ) as transport:
        assert transport.send(b"") == TryAgain("TimeoutError: no connection to 127.0.0.1 in 0.1 s")
        given_up.set()
        with there:
            assert there.recv(1) == b""


def test_retry_after_may_be_a_date() -> None:
    transport = HttpTransport(ExportSettings("http://127.0.0.1:1"), lambda: 1_000_000.0)
    date = email.utils.formatdate(1_000_030, usegmt=True)
    assert transport._retry_after_s(date) == 30
    assert transport._retry_after_s("7") == 7
    assert transport._retry_after_s("soon") is None
    assert transport._retry_after_s(None) is None


def test_a_connection_that_was_closed_while_idle_is_no_failure(tmp_path: Path) -> None:
    receiver = HttpReceiver(free_port())
    transport = HttpTransport(ExportSettings(receiver.url, "http/protobuf"))
    with receiver:
        assert not isinstance(transport.send(b""), TryAgain)
        assert transport._connection.sock is not None
        transport._connection.sock.shutdown(socket.SHUT_RDWR)
        assert not isinstance(transport.send(b""), TryAgain)
    transport.close()


Script = Callable[[socket.socket], object]
KEPT = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def says(*answers: bytes) -> Script:
    """To each request the next of them; and then it closes."""

    def play(connection: socket.socket) -> None:
        for answer in answers:
            asked = b""
            while not asked.endswith(b"\r\n\r\n"):  # there is no body
                asked += connection.recv(1 << 16)
            connection.sendall(answer)

    return play


@contextlib.contextmanager
def scripted(*scripts: Script, timeout_s: float = 600) -> Iterator[Transport]:
    """A transport to a server that does one after the other with its connections."""

    def serve() -> None:
        for script in scripts:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                script(connection)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        settings = ExportSettings(url, "http/protobuf", compression="none", timeout_s=timeout_s)
        with closing_transport(settings) as transport:
            yield transport
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (
            b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            TryAgain("HTTP 503 Busy", 7.0),
        ),
        (b"HTTP/1.1 2", TryAgain("BadStatusLine: HTTP/1.1 2")),
    ],
)
def test_what_was_answered_is_not_sent_again_at_once(answer: bytes, outcome: Outcome) -> None:
    with scripted(says(KEPT, answer), says(KEPT)) as transport:
        assert transport.send(b"") == Accepted()
        assert transport.send(b"") == outcome


def test_what_a_server_is_silent_about_is_not_sent_again_at_once() -> None:
    def fall_silent(connection: socket.socket) -> None:
        says(KEPT)(connection)
        while connection.recv(1 << 16):
            pass

    with scripted(fall_silent, says(KEPT), timeout_s=0.5) as transport:
        assert transport.send(b"") == Accepted()
        assert transport.send(b"") == TryAgain("TimeoutError: no answer of 127.0.0.1 in 0.5 s")


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_an_answer_that_trickles_is_not_waited_for(more: bytes) -> None:
    def trickle(connection: socket.socket) -> None:
        says(b"HTTP/1.1 200 OK\r\n" + more + b"Content-Length: 500\r\n\r\n")(connection)
        for _ in range(500):
            given_up.wait(0.01)
            connection.sendall(b"a")

    given_up = threading.Event()
    with scripted(trickle, says(KEPT), timeout_s=0.5) as transport:
        late = transport.send(b"")
        given_up.set()
        assert late == TryAgain("TimeoutError: no answer of 127.0.0.1 in 0.5 s")
        assert transport.send(b"") == Accepted()
