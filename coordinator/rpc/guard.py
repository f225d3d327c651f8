# SPDX-License-Identifier: Apache-2.0
"""Stands before each call: who calls, whether it may, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc

from coordinator.counters import ServerCounters
from coordinator.rpc.budget import Budget
from coordinator.rpc.identity import Identity, Names, Unidentified, names_of, why_not
from runtime.log import Log, PeerLog
from runtime.settings.tls import CoordinatorTlsSettings
from runtime.tls import Credentials, Rotating, TlsError, Usage

# In quotes: generic for mypy only.
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and how long its certificate is valid, in seconds since 1970."""

    identity: Identity
    expires_at_s: float


class Guard:
    """Asks each caller who it is, if there is TLS; without, everybody may call everything."""

    def __init__(
        self,
        settings: CoordinatorTlsSettings | None,
        counters: ServerCounters,
        distrust: Callable[[], object],
        log: Log,
        peer_log: PeerLog,
    ) -> None:
        """``distrust`` ends all connections. TlsError: the files cannot be used."""
        self._counters = counters
        self._distrust = distrust
        self._log = log
        self._peer_log = peer_log
        self.budget = Budget(counters, peer_log)
        self._names: Names | None = None
        self._given: Credentials | None = None
        self.files: Rotating | None = None
        """None: without TLS."""
        if settings is not None:
            self.files, self._names = self._read(settings)

    def _read(self, settings: CoordinatorTlsSettings) -> tuple[Rotating, Names]:
        files = Rotating(settings, "tls", Usage.SERVER, self._log)
        files.take_up()
        assert files.current is not None
        try:
            return files, names_of(settings, files.current.facts.uris)
        except ValueError as error:
            raise TlsError(str(error)) from error

    def reconfigure(self, settings: CoordinatorTlsSettings | None) -> None:
        """Go on with these files and names; TlsError leaves all as it was."""
        if settings is None or self.files is None:
            return  # waits for a restart
        before, names = self.files.current, self._names
        files, self._names = self._read(settings)
        if files.current == before and files.files == self.files.files:
            files = self.files
        self.files = files
        self._end_untrusted(before, names)

    def look(self) -> None:
        """Take files up that were changed."""
        if self.files is not None:
            before = self.files.current
            if self.files.look():
                self._end_untrusted(before, self._names)

    def _end_untrusted(self, before: Credentials | None, names: Names | None) -> None:
        """Who is trusted no more must not go on; all others come again."""
        assert self.files is not None
        assert self.files.current is not None
        assert before is not None
        if self.files.current.ca != before.ca or self._names != names:
            self._log.info("trusts others than before, so all connections begin anew")
            self._distrust()

    @property
    def expires_at_s(self) -> float:
        """When the certificate in use is over, in seconds since 1970; 0: there is none."""
        return self.files.expires_at_s if self.files is not None else 0.0

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What new connections are met with: always the latest. None: without TLS."""
        if self.files is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            self._new_configuration,  # type: ignore[arg-type] # None is allowed, as it says itself
            require_client_authentication=True,
        )

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.files is not None
        given = self._given = self.files.current
        assert given is not None
        return grpc.ssl_server_certificate_configuration(
            [(given.key, given.certificate)], root_certificates=given.ca
        )

    def _new_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """For each connection, in a thread of gRPC's. None: as before."""
        assert self.files is not None
        return None if self.files.current is self._given else self._configuration()

    # ------------------------------------------------------------------ calls

    def handlers(self, handlers: Mapping[str, _Handler]) -> dict[str, _Handler]:
        """The same ones, for who may call them."""
        return {method: self._guarded(method, handler) for method, handler in handlers.items()}

    def _guarded(self, method: str, handler: _Handler) -> _Handler:
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._single(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._listing(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        assert handler.stream_stream is not None
        return grpc.stream_stream_rpc_method_handler(
            self._single(method, handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _single(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answer(request: object, context: _Context) -> object:
            async with self._admitted(method, context):
                return await behaviour(request, context)

        return answer

    def _listing(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def answers(request: object, context: _Context) -> AsyncIterator[object]:
            async with (
                self._admitted(method, context),
                contextlib.aclosing(behaviour(request, context)) as replies,
            ):
                async for reply in replies:
                    yield reply

        return answers

    def caller(self, context: _Context) -> Caller | None:
        """Who calls; None if nobody is asked. Unidentified says why it is nobody."""
        if self._names is None:
            return None
        from runtime.certificates import certificates

        # The first is the caller's own, if it showed a chain.
        shown = certificates(b"".join(context.auth_context().get("x509_pem_cert", ())))[0]
        identity = self._names.identity(shown.uris, shown.dns_names)
        return Caller(identity, shown.expires_at.timestamp())

    @contextlib.asynccontextmanager
    async def _admitted(self, method: str, context: _Context) -> AsyncIterator[None]:
        """Let a call in, or end it; and end it when the certificate is over."""
        try:
            caller = self.caller(context)
        except Unidentified as error:
            await self._refuse(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        identity = caller.identity if caller is not None else None
        reason = why_not(identity, method)
        if reason is not None:
            await self._refuse(context, grpc.StatusCode.PERMISSION_DENIED, reason)
        reason = self.budget.why_not(identity)
        if reason is not None:
            self._counters.too_many_calls += 1
            self._peer_log.warning(context.peer(), f"{context.peer()}: refused: {reason}")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        with self.budget.call(context.peer(), identity):
            if caller is None:
                yield
            else:
                async with self._until_it_is_over(caller, context):
                    yield

    @staticmethod
    @contextlib.asynccontextmanager
    async def _until_it_is_over(caller: Caller, context: _Context) -> AsyncIterator[None]:
        limit = asyncio.timeout(caller.expires_at_s - time.time())
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                f"the certificate of {caller.identity} is over since it was shown; connect again"
                " with a new one",
            )

    async def _refuse(self, context: _Context, code: grpc.StatusCode, reason: str) -> NoReturn:
        self._counters.not_permitted += 1
        self._peer_log.warning(context.peer(), f"{context.peer()}: refused: {reason}")
        await context.abort(code, reason)
        raise AssertionError("an aborted call went on")
