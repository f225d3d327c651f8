# SPDX-License-Identifier: Apache-2.0
"""The command line of ``backsightctl``: what may be said, and who is asked then."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctl.config import SCHEMAS
from ctl.export import FORMATS
from protocol.verdicts import VerdictKind
from runtime import VERSION
from runtime.endpoint import HostAndPort
from runtime.schema import Matching, Size
from runtime.settings.tls import HOST_NAME, TRUST_DOMAIN

DEFAULT_NODE = "/run/backsight/node.sock"
_DEFAULT_WITH_TLS = "127.0.0.1:4770"
_DEFAULT_COORDINATOR = "unix:/run/backsight-coordinator/coordinator.sock"

# As large as the protocol's field.
_LIMIT_MAX = (1 << 32) - 1


def _limit(text: str) -> int:
    """How many; 0: all."""
    if not text.isdecimal() or not text.isascii() or int(text) > _LIMIT_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: a whole number from 0, which means all, to {_LIMIT_MAX}"
        )
    return int(text)


def _size_bytes(text: str) -> int:
    try:
        return int(Size(1, 1 << 40).admit(text))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; allowed: {Size(1, 1 << 40).allowed()}"
        ) from None


def _duration_ns(text: str) -> int:
    """As ``30s``, ``10m``, ``1.5h``, ``7d``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration; allowed: 500ms, 30s, 10m, 1.5h, 7d"
        )
    unit_ns = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
    return int(float(match[1]) * unit_ns[match[2]])


def argument_parser(description: str) -> argparse.ArgumentParser:
    """What it understands. ``command``: what is asked for; ``asks``: who may be asked."""
    parser = argparse.ArgumentParser(prog="backsightctl", description=description)
    parser.add_argument(
        "--coordinator",
        metavar="WHERE",
        help="HOST:PORT, or unix:/PATH on its own machine; default: $BACKSIGHT_COORDINATOR, or"
        f" {_DEFAULT_COORDINATOR}, or {_DEFAULT_WITH_TLS} with --tls",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="with ca.crt, tls.crt and tls.key, to ask a coordinator by TLS (default: $BACKSIGHT_TLS)",
    )
    parser.add_argument(
        "--node", metavar="SOCKET", help=f"ask a node on this machine (default {DEFAULT_NODE})"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str,
        text: str,
        *,
        asks: Sequence[str] = ("coordinator",),
        of: Any = commands,  # noqa: ANN401 - argparse does not name its type
    ) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = of.add_parser(name, help=text, description=text)
        sub.set_defaults(asks=asks, command=sub.prog.partition(" ")[2])
        sub.add_argument("--json", action="store_true", help="for programs")
        return sub

    traces = command("traces", "what the coordinator collected, newest first")
    export = command("export", "collected traces as a file for another tool")
    export.add_argument("traces", nargs="*", metavar="TRACE", help="32 hex digits each")
    export.add_argument(
        "--format", choices=FORMATS, default="otlp-json", help="default: %(default)s"
    )
    export.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    tail = command("tail", "traces from now on, as verdicts are given on them")
    tail.add_argument("--limit", type=_limit, default=0, metavar="N", help="end after N (0: never)")
    snapshot = command("snapshot", "collect what all pools hold of the last seconds")
    snapshot.add_argument(
        "--last", type=_duration_ns, default="30s", metavar="TIME", help="default: %(default)s"
    )
    snapshot.add_argument(
        "--bytes",
        type=_size_bytes,
        default="64MiB",
        metavar="SIZE",
        help="stop when the nodes have so much of it (default: %(default)s)",
    )
    snapshot.add_argument(
        "--service", metavar="NAME", help="only traces that a process of this service wrote to"
    )
    for sub in (traces, export):
        sub.add_argument("--limit", type=_limit, metavar="N", help="only the newest N (0: all)")
        sub.add_argument("--service", metavar="NAME", help="only those with a span of this service")
        sub.add_argument(
            "--last",
            type=_duration_ns,
            metavar="TIME",
            help="only those of the last 30s, 10m, 2h, 7d",
        )
    traces.add_argument("--pinned", action="store_true", help="only those that are pinned")
    for sub in (traces, export, tail):
        sub.add_argument("--trigger", metavar="NAME", help="only those of this trigger")
        sub.add_argument(
            "--verdict",
            metavar="KIND",
            choices=[kind.value for kind in VerdictKind],
            help="only these: %(choices)s",
        )
    show = command(
        "show",
        "one trace over all its nodes; with --node, what that node holds",
        asks=("coordinator", "node"),
    )
    show.add_argument("trace", help="32 hex digits")
    pin = command("pin", "keep a trace, however old it gets")
    unpin = command("unpin", "let a trace go when its time is over")
    delete = command("delete", "delete all that is stored of a trace")
    for sub in (pin, unpin, delete):
        sub.add_argument("trace", metavar="TRACE", help="32 hex digits")
    delete.add_argument("--yes", action="store_true", help="without being asked again")
    nodes = command("nodes", "the nodes that the coordinator knows")
    nodes.add_argument(
        "--forget", metavar="NAME", help="forget this one, which is gone for good, instead"
    )
    command("counters", "what the coordinator counted since its start")
    status = command(
        "status",
        "the node on this machine; with --coordinator, the coordinator, or one of its nodes",
        asks=("node", "coordinator"),
    )
    status.add_argument(
        "of", nargs="?", metavar="NODE", help="this node, wherever it is, by the coordinator"
    )
    config = commands.add_parser("config", help="configuration files of the daemons")
    on_config = config.add_subparsers(required=True, metavar="COMMAND")
    check_help = "whether it is valid for a daemon, and if not, why"
    config_check = command("check", check_help, asks=(), of=on_config)
    config_check.add_argument("file", type=Path, help="YAML")
    config_check.add_argument(
        "--kind", choices=SCHEMAS, help="what it is for (default: whose keys it has)"
    )
    _add_pki(command, commands)
    token = command("token", "a token by which a program may read over HTTP", asks=())
    token.add_argument("name", type=_name, metavar="NAME", help="who shall have it")
    doctor = command(
        "doctor", "which kernel probes would work on this machine, by trying them", asks=()
    )
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="the node's; without it, all defaults"
    )
    trigger = command("trigger", "fire a trigger on the node on this machine", asks=("node",))
    trigger.add_argument("trace", help="32 hex digits")
    trigger.add_argument(
        "--name",
        default="operator",
        help="the trigger's name, 1 to 31 of [a-z0-9_.-] (default: %(default)s)",
    )
    trigger.add_argument(
        "--why", default="fired by hand", help="for the person who reads the trace"
    )
    return parser


def _add_pki(command: Callable[..., argparse.ArgumentParser], commands: Any) -> None:  # noqa: ANN401
    """A private CA, and what it signs."""
    pki = commands.add_parser("pki", help="a private CA for TLS, for who has none")
    on_pki = pki.add_subparsers(required=True, metavar="COMMAND")
    init = command("init", "make the CA", asks=(), of=on_pki)
    init.add_argument(
        "--domain",
        type=_domain,
        required=True,
        metavar="NAME",
        help="what its names belong to, as prod.example.org",
    )
    coordinator = command("coordinator", "make what the coordinator shows", asks=(), of=on_pki)
    node = command("node", "make what a node shows", asks=(), of=on_pki)
    operator = command(
        "operator", "make what a person shows who reads and collects", asks=(), of=on_pki
    )
    viewer = command("viewer", "make what a person shows who only reads", asks=(), of=on_pki)
    for sub in (node, operator, viewer):
        sub.add_argument("name", type=_name, metavar="NAME", help="for a node its key `node`")
    for sub in (coordinator, node):
        sub.add_argument(
            "--dns",
            action="append",
            default=[],
            type=_dns_name,
            metavar="NAME",
            help="as it is called",
        )
    coordinator.add_argument(
        "--ip",
        action="append",
        default=[],
        type=_address,
        metavar="ADDRESS",
        help="as it is called",
    )
    for sub in (init, coordinator, node, operator, viewer):
        sub.add_argument(
            "--directory",
            type=Path,
            default=Path("backsight-pki"),
            metavar="DIR",
            help="of the CA, to be kept secret (default: %(default)s)",
        )
        sub.add_argument(
            "--days",
            type=_days,
            metavar="N",
            help="how long it is valid (default: ten years)"
            if sub is init
            else "how long it is valid (default: a year)",
        )
        sub.add_argument("--replace", action="store_true", help="make it anew, if it is there")


def _checked(bound: Matching, text: str) -> str:
    try:
        return bound.admit(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: {bound.allowed()}") from None


def _name(text: str) -> str:
    return _checked(
        Matching(r"[A-Za-z0-9_.-]{1,63}", "1 to 63 characters of A-Z a-z 0-9 _ . -"), text
    )


def _domain(text: str) -> str:
    return _checked(TRUST_DOMAIN, text)


def _dns_name(text: str) -> str:
    return _checked(HOST_NAME, text)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: an IP address") from None


# A hundred years, and X.509 knows years of four digits.
_DAYS_MAX = 36500


def _days(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 1 <= int(text) <= _DAYS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number from 1 to {_DAYS_MAX}")
    return int(text)


_BEFORE = {"--coordinator": "WHERE", "--tls": "DIR", "--node": "SOCKET"}
"""What stands before the command, with its value."""


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """What was said; wrong usage ends the program."""
    arguments, unknown = parser.parse_known_args(argv)
    for word in unknown:
        name = word.partition("=")[0]
        if name in _BEFORE:
            parser.error(
                f"{name} goes before the command: backsightctl {name} {_BEFORE[name]}"
                f" {arguments.command} ..."
            )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


_WHOM = {"coordinator": "the coordinator", "node": "the node on this machine"}


def settle_whom(arguments: argparse.Namespace) -> None:
    """ValueError if it was said whom to ask, and the command asks another; else fill that in.

    ``asked``: who is, if anybody.
    """
    given = [name for name in _WHOM if getattr(arguments, name) is not None]
    arguments.asked = next(iter((*given, *arguments.asks)), None)
    if getattr(arguments, "of", None) is not None:
        if arguments.node is not None:
            raise ValueError("status: the coordinator knows a node by its name: leave out --node")
        arguments.asked = "coordinator"
    whom = " or ".join(_WHOM[name] for name in arguments.asks) or "nobody"
    for name in given:
        if name not in arguments.asks:
            raise ValueError(f"{arguments.command} asks {whom}: leave out --{name}")
    if len(given) > 1:
        raise ValueError(f"{arguments.command} asks {whom}: leave out --coordinator or --node")
    source = "--coordinator"
    tls_is_said = arguments.tls is not None
    if not tls_is_said and os.environ.get("BACKSIGHT_TLS"):
        arguments.tls = Path(os.environ["BACKSIGHT_TLS"])
    if arguments.coordinator is None:
        source = "BACKSIGHT_COORDINATOR"
        default = _DEFAULT_COORDINATOR if arguments.tls is None else _DEFAULT_WITH_TLS
        arguments.coordinator = os.environ.get(source) or default
    if arguments.coordinator.startswith("unix:"):
        if tls_is_said:
            raise ValueError(f"{arguments.coordinator}: there is no TLS; leave out --tls")
        arguments.tls = None
    if arguments.asked == "coordinator":
        # gRPC would take a name without a port for one with 443.
        try:
            if not arguments.coordinator.startswith("unix:/"):
                HostAndPort().admit(arguments.coordinator)
        except ValueError:
            raise ValueError(
                f"{source}: {arguments.coordinator!r}; allowed: {HostAndPort().allowed()}, or unix:/PATH"
            ) from None
