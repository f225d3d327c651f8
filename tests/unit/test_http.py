# SPDX-License-Identifier: Apache-2.0
"""The HTTP server serves what it has threads for, and ends at once."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import queue
import re
import socket
import socketserver
import ssl
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ctl.pki import Authority
from runtime import http as daemon_http
from runtime.http import HttpServer, UnixHttpServer
from runtime.settings.tls import TlsFiles
from runtime.tls import ServerContext
from tests.unit.logs import SILENT, logs_to

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment


def hello(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


def get(server: HttpServer, path: str = "/", host: str = "127.0.0.1") -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection(host, server.port)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize(("endpoint", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1")])
def test_it_serves_both_families(endpoint: str, host: str) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with HttpServer(endpoint, hello, SILENT) as server:
        assert get(server, "/x", host) == (200, b"/x")


def test_one_that_fails_is_answered_with_500_and_logged() -> None:
    def fail(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        raise LookupError(environ["PATH_INFO"])

    log: list[str] = []
    with HttpServer("127.0.0.1:0", fail, logs_to(log)) as server:
        status, text = get(server, "/lost")
        assert status == 500 and b"LookupError" not in text
        # The next one finds a thread too.
        assert get(server, "/again")[0] == 500
    assert len(log) == 2 and re.fullmatch(
        r"GET /lost failed: LookupError\('/lost'\), in \S+test_http\.py:\d+", log[0]
    )


def test_one_too_many_is_refused_at_once_and_the_next_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_http, "_REQUESTS_AT_ONCE", 2)
    inside = threading.Semaphore(0)
    go_on = threading.Event()

    def slow(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        inside.release()
        assert go_on.wait(60)
        return hello(environ, start_response)

    answers: list[int] = []
    with HttpServer("127.0.0.1:0", slow, SILENT) as server:
        asking = [threading.Thread(target=lambda: answers.append(get(server)[0])) for _ in range(2)]
        for thread in asking:
            thread.start()
        for _ in asking:
            inside.acquire()
        before = threading.active_count()
        assert get(server)[0] == 503
        assert threading.active_count() == before
        go_on.set()
        for thread in asking:
            thread.join()
        assert answers == [200, 200]
        # Each gave its thread back.
        while (status := get(server)[0]) == 503:
            pass
        assert status == 200


def test_it_ends_while_somebody_is_connected_and_says_nothing() -> None:
    with (
        HttpServer("127.0.0.1:0", hello, SILENT) as server,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        assert get(server)[0] == 200
        port = server.port
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_nobody_can_listen_twice_on_one_port() -> None:
    with (
        HttpServer("127.0.0.1:0", hello, SILENT) as server,
        pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}: Address already"),
    ):
        HttpServer(f"127.0.0.1:{server.port}", hello, SILENT)


def test_a_peer_that_breaks_off_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with HttpServer("127.0.0.1:0", hello, SILENT) as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as broken:
                broken.send(b"GET / HTTP/1.0\r\n")
        assert get(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_who_asks_nothing_gives_way_to_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not because it takes too long.
    monkeypatch.setattr(daemon_http, "_TIMEOUT_S", 1e6)
    monkeypatch.setattr(daemon_http._Handler, "timeout", 1e6)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(HttpServer("127.0.0.1:0", hello, SILENT))
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(2 * daemon_http._REQUESTS_AT_ONCE)
        ]
        for client in idle[::2]:
            client.send(b"GET / HT")
        for _ in range(3):
            assert get(server)[0] == 200
        # Those who wait longest.
        assert idle[0].recv(1) == b""
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)


def test_who_takes_too_long_to_read_holds_no_thread_that_others_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon_http, "_REQUESTS_AT_ONCE", 2)
    inside = threading.Semaphore(0)

    def large(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/large":
            return hello(environ, start_response)
        start_response("200 OK", [])
        inside.release()
        return [bytes(16 << 20)]

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(HttpServer("127.0.0.1:0", large, SILENT))
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(2)
        ]
        for client in slow:
            client.send(b"GET /large HTTP/1.0\r\n\r\n")
            inside.acquire()
        # Not before it is time.
        assert get(server)[0] == 503
        server._server._overdue_s = dict.fromkeys(server._server._overdue_s, 0.0)
        assert get(server)[0] == 503
        while (status := get(server)[0]) == 503:
            pass
        assert status == 200


def test_at_a_unix_socket_the_kernel_says_whose_a_request_is(tmp_path: Path) -> None:
    def whose(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [f"{environ[daemon_http.PEER].uid} {environ['REMOTE_ADDR']}".encode()]

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "q.sock"
        with UnixHttpServer(path, whose, SILENT):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.send(b"GET / HTTP/1.0\r\n\r\n")
                said = b"".join(iter(lambda: client.recv(4096), b""))
            assert said.endswith(f"\r\n\r\n{os.getuid()} uid {os.getuid()}".encode())
        assert not path.exists()


def test_by_tls_who_shows_nothing_may_ask_and_who_says_nothing_gives_way(tmp_path: Path) -> None:
    ca = Authority.create(tmp_path / "pki", "d")
    issued = ca.issue("coordinator", is_server=True, addresses=["127.0.0.1"]).directory
    files = TlsFiles.of_directory(issued)
    context = ServerContext(files, "tls", SILENT)
    trusting = ssl.create_default_context(cafile=files.ca)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(HttpServer("127.0.0.1:0", hello, SILENT, context.current))
        for _ in range(2 * daemon_http._REQUESTS_AT_ONCE):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting)
        stack.enter_context(contextlib.closing(connection))
        connection.request("GET", "/x")
        assert connection.getresponse().read() == b"/x"
        # In clear text there is nothing.
        with pytest.raises((http.client.HTTPException, OSError)):
            get(server)
        # Another certificate is shown to who comes after that.
        before = ssl.get_server_certificate(("127.0.0.1", server.port))
        ca.issue("coordinator", is_server=True, addresses=["127.0.0.1"], replace=True)
        context.look(files)
        assert ssl.get_server_certificate(("127.0.0.1", server.port)) != before


def server_files(directory: Path) -> TlsFiles:
    ca = Authority.create(directory / "pki", "d")
    issued = ca.issue("coordinator", is_server=True, addresses=["127.0.0.1"])
    return TlsFiles.of_directory(issued.directory)


def get_by_tls(server: HttpServer, files: TlsFiles) -> bytes:
    trusting = ssl.create_default_context(cafile=files.ca)
    connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=trusting)
    with contextlib.closing(connection):
        connection.request("GET", "/x")
        return connection.getresponse().read()


def test_who_resets_a_connection_before_it_is_encrypted_keeps_no_thread(tmp_path: Path) -> None:
    files = server_files(tmp_path)
    good = ServerContext(files, "tls", SILENT).current()
    resets = 2 * daemon_http._REQUESTS_AT_ONCE

    class Reset:
        """What wrap_socket() does of such a connection."""

        def wrap_socket(self, connection: socket.socket, **_: object) -> ssl.SSLSocket:
            connection.detach()
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    contexts = iter([Reset()] * resets)

    def context() -> Any:
        return next(contexts, good)

    with HttpServer("127.0.0.1:0", hello, SILENT, context) as server:
        for _ in range(resets):
            with socket.create_connection(("127.0.0.1", server.port)):
                pass
        assert get_by_tls(server, files) == b"/x"


def test_whoever_is_hung_up_on_before_the_handshake_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception in a thread would end the daemon (runtime.main.die_with_any_thread)."""
    monkeypatch.setattr(daemon_http, "_REQUESTS_AT_ONCE", 1)
    files = server_files(tmp_path)
    hung_up = threading.Event()
    died: list[object] = []
    failed: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    hang_up, shake_hands = daemon_http._hang_up, ssl.SSLSocket.do_handshake

    def hang_up_and_tell(connection: socket.socket) -> None:
        hang_up(connection)
        hung_up.set()

    def shake_hands_late(self: ssl.SSLSocket, block: bool = False) -> None:
        if self.server_side:
            assert hung_up.wait(60)
        try:
            shake_hands(self, block)
        except Exception as error:
            failed.put(error)
            raise

    monkeypatch.setattr(daemon_http, "_hang_up", hang_up_and_tell)
    monkeypatch.setattr(ssl.SSLSocket, "do_handshake", shake_hands_late)
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
    context = ServerContext(files, "tls", SILENT)
    with (
        HttpServer("127.0.0.1:0", hello, SILENT, context.current) as server,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        assert get_by_tls(server, files) == b"/x"
    assert isinstance(failed.get(timeout=60), OSError)
    assert not died


def test_a_handshake_that_fails_in_any_way_ends_its_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = server_files(tmp_path)
    died: list[object] = []
    shake_hands = ssl.SSLSocket.do_handshake
    failures = [AttributeError("of nothing")]

    def fail_once(self: ssl.SSLSocket, block: bool = False) -> None:
        if self.server_side and failures:
            raise failures.pop()
        shake_hands(self, block)

    monkeypatch.setattr(ssl.SSLSocket, "do_handshake", fail_once)
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
    context = ServerContext(files, "tls", SILENT)
    with HttpServer("127.0.0.1:0", hello, SILENT, context.current) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            assert client.recv(1) == b""
        assert get_by_tls(server, files) == b"/x"
    assert not died


def test_an_application_can_end_a_request_that_takes_too_long() -> None:
    environs: queue.SimpleQueue[WSGIEnvironment] = queue.SimpleQueue()
    go_on = threading.Event()

    def slow(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        environs.put(environ)
        assert go_on.wait(60)
        return hello(environ, start_response)

    with (
        HttpServer("127.0.0.1:0", slow, SILENT) as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
    ):
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        give_up_overdue = environs.get(timeout=60)[daemon_http.GIVE_UP_OVERDUE]
        client.setblocking(False)
        give_up_overdue()  # it is not
        with pytest.raises(BlockingIOError):
            client.recv(1)
        client.setblocking(True)
        server._server._overdue_s = dict.fromkeys(server._server._overdue_s, 0.0)
        give_up_overdue()
        assert client.recv(1) == b""
        go_on.set()
        while server._server._overdue_s:
            pass
        give_up_overdue()  # it ended


class Waits(threading.Event):
    """Is never waited for; counts how often it was to be."""

    count = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None and timeout > 0
        self.count += 1
        return False


def test_without_fds_it_waits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]
    accept = socketserver.TCPServer.get_request

    def get_request(self: socketserver.TCPServer) -> tuple[object, object]:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return accept(self)

    log: list[str] = []
    monkeypatch.setattr(socketserver.TCPServer, "get_request", get_request)
    with HttpServer("127.0.0.1:0", hello, logs_to(log)) as server:
        waits = server._server.ending = Waits()
        assert get(server)[0] == 200
        assert waits.count == 2
    assert ["Too many open files" in line for line in log] == [True, True]
