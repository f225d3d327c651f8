# SPDX-License-Identifier: Apache-2.0
"""Who may read over HTTP, by token, by user, or unasked."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.web.gate import Gate
from ctl.__main__ import main
from protocol.tokens import TOKENS_BYTES_MAX, TokenError, drawn, hashed, line_of, read_tokens
from runtime.http import HttpServer, UnixHttpServer
from runtime.settings.allow import AllowSettings
from runtime.settings.coordinator import AccessSettings, QuerySettings, Settings
from tests.unit.logs import SILENT, logs_to

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

USER = 65534


def secret(_: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"all traces"]


class World:
    """Something secret behind a gate; ``settings`` may change at any time."""

    def __init__(self, directory: Path) -> None:
        self.tokens = directory / "tokens"
        self.settings = Settings(query=QuerySettings(tokens=str(self.tokens)))
        self.said: list[str] = []
        self.served = Gate(lambda: self.settings, logs_to(self.said)).before(secret)

    def allow(self, **access: Any) -> None:
        self.settings = replace(self.settings, access=AccessSettings(**access))

    @contextlib.contextmanager
    def serving(self) -> Iterator[HttpServer]:
        with HttpServer("127.0.0.1:0", self.served, SILENT) as server:
            yield server


def ask(server: HttpServer, **headers: str) -> tuple[int, str, dict[str, str]]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("GET", "/", headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), dict(response.headers)


def test_who_shows_a_token_may_read_and_nobody_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    token, other = drawn(), drawn()
    world.tokens.write_text(f"# who may read\n\n{line_of('grafana', token)}  # since May\n")
    with world.serving() as server:
        for shown in f"Bearer {token}", f"bearer  {token}":
            status, text, _ = ask(server, Authorization=shown)
            assert (status, text) == (200, "all traces")
        status, text, headers = ask(server)
        assert status == 401
        assert headers["WWW-Authenticate"] == 'Bearer realm="backsight"'
        assert "backsightctl token NAME" in json.loads(text)["errors"][0]["msg"]
        refused = (
            f"Bearer {other}",
            f"Bearer {hashed(token)}",
            "Bearer ",
            f"Basic {token}",
            token,
            f"Bearer {token} {token}",
        )
        for shown in refused:
            status, text, _ = ask(server, Authorization=shown)
            assert status == 401
            assert "all traces" not in text
        # Another one is good from the moment on in which it is there, and the old one no more.
        world.tokens.write_text(line_of("jaeger", other))
        assert ask(server, Authorization=f"Bearer {other}")[0] == 200
        assert ask(server, Authorization=f"Bearer {token}")[0] == 401
    assert any("127.0.0.1 is refused" in line for line in world.said)
    assert not any(token in line or other in line for line in world.said)


def test_who_is_refused_often_hides_nobody_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    with world.serving() as server:
        for address in ["127.0.0.1"] * 20 + ["127.0.0.2"]:
            connection = http.client.HTTPConnection(
                "127.0.0.1", server.port, source_address=(address, 0)
            )
            with contextlib.closing(connection):
                connection.request("GET", "/")
                assert connection.getresponse().status == 401
    assert len(world.said) == 11
    assert world.said[-1].startswith("query: 127.0.0.2 is refused")


def test_a_file_of_tokens_that_cannot_be_read_lets_nobody_in_and_is_said_once(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    token = drawn()
    shown = f"Bearer {token}"

    def said() -> list[str]:
        return [line for line in world.said if "query.tokens: /" in line]

    with world.serving() as server:
        assert [ask(server, Authorization=shown)[0] for _ in range(3)] == [401] * 3
        assert len(said()) == 1 and "No such file" in said()[0]
        world.tokens.write_text(f"{line_of('a', token)}\ngrafana {token}\n")
        assert [ask(server, Authorization=shown)[0] for _ in range(3)] == [401] * 3
        assert len(said()) == 2 and "line 2: allowed: NAME and 64 hex digits" in said()[1]
        world.tokens.write_text(line_of("a", token))
        assert ask(server, Authorization=shown)[0] == 200
        world.tokens.write_bytes(bytes(TOKENS_BYTES_MAX + 1))
        assert ask(server, Authorization=shown)[0] == 401
        assert f"allowed: {TOKENS_BYTES_MAX}" in said()[2]


def test_backsightctl_makes_a_token_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", "grafana", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert read_tokens(made["line"]) == {hashed(made["token"]): "grafana"}
    assert main(["token", "grafana"]) == 0
    token, line = capsys.readouterr().out.splitlines()
    assert read_tokens(line) == {hashed(token): "grafana"}
    assert token != made["token"]
    with pytest.raises(TokenError):
        read_tokens(token)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:16686", 200),
        ("[::1]:16686", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("traces.example.org", 200),
        ("traces.example.org.:443", 200),
        ("jaeger.example.org", 200),
        ("Jaeger.Example.Org:443", 200),
        ("evil.example.com", 421),
        ("127.0.0.1.evil.example.com", 421),
        ("localhost.evil.example.com:16686", 421),
        ("evil.example.com:127.0.0.1", 421),
        ("[evil]", 421),
    ],
)
def test_who_is_let_in_unasked_must_know_the_name(tmp_path: Path, host: str, status: int) -> None:
    """Not a page of somebody else's, whose name was made to lead here."""
    world = World(tmp_path)
    world.allow(anonymous="viewer")
    query = replace(world.settings.query, hosts=("traces.example.org", "Jaeger.Example.ORG."))
    world.settings = replace(world.settings, query=query)
    with world.serving() as server:
        assert ask(server, Host=host)[0] == status


@pytest.mark.parametrize(
    ("at_grpc", "own", "status"),
    [
        ("nobody", None, 401),
        ("viewer", None, 200),
        ("operator", None, 200),
        ("nobody", "viewer", 200),
        ("viewer", "nobody", 401),
    ],
)
def test_who_shows_no_token_reads_where_that_is_allowed_here(
    tmp_path: Path, at_grpc: str, own: str | None, status: int
) -> None:
    world = World(tmp_path)
    world.allow(anonymous=at_grpc)
    world.settings = replace(world.settings, query=replace(world.settings.query, anonymous=own))
    with world.serving() as server:
        assert ask(server)[0] == status


def asked_as(path: Path, uid: int) -> str:
    """The status of an answer at a Unix socket."""
    ask = (
        "import socket, sys\n"
        "with socket.socket(socket.AF_UNIX) as asked:\n"
        "    asked.connect(sys.argv[1])\n"
        "    asked.send(b'GET / HTTP/1.0\\r\\n\\r\\n')\n"
        "    print(asked.recv(99).split()[1].decode())\n"
    )
    command = ["/usr/bin/python3", "-c", ask, str(path)]
    done = subprocess.run(
        command, user=uid, extra_groups=(), cwd="/", env={}, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode().strip()


def test_at_a_unix_socket_users_and_groups_may_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    with tempfile.TemporaryDirectory(prefix="backsight-") as name:
        Path(name).chmod(0o755)
        path = Path(name) / "q.sock"
        with UnixHttpServer(path, world.served, SILENT):
            assert asked_as(path, os.getuid()) == "200"
            assert asked_as(path, USER) == "403"
            world.allow(viewers=AllowSettings(users=(USER,)))
            assert asked_as(path, USER) == "200"
            world.allow(operators=AllowSettings(users=(USER,)))
            assert asked_as(path, USER) == "200"
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
