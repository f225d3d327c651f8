# SPDX-License-Identifier: Apache-2.0
"""``backsightctl``: what was collected, why, and whether it is whole.

Exit status: 0 done; 1 not found, or nobody answered; 2 wrong usage, or a bad configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import backsight_pb2 as pb

from ctl.config import SCHEMAS, check
from ctl.coordinator import AskError, CoordinatorClient, NotFound
from ctl.doctor import DoctorConfigError, DoctorError, examine, in_words
from ctl.export import FORMATS, on_one_clock, write_export
from ctl.node import NodeClient
from ctl.progress import progress_bar
from ctl.trace import Json, summary_json, trace_view
from ctl.waterfall import cut, milliseconds, waterfall
from formats.stamped import StampedTrace, stamped
from protocol.messages import TraceId
from protocol.verdicts import VerdictKind
from protocol.wire import parse_trace_id
from runtime import VERSION
from runtime.endpoint import HostAndPort
from runtime.printable import printable
from runtime.schema import EXIT_CONFIG, ConfigError, Size

_DEFAULT_COORDINATOR = "127.0.0.1:4770"
_DEFAULT_NODE = "/run/backsight/node.sock"


def _print_json(value: object) -> None:
    # In ASCII: other characters too can drive a terminal.
    print(json.dumps(value))


def _print_heading(arguments: argparse.Namespace, heading: str) -> None:
    """For a person; a program that reads lines wants none."""
    if not arguments.json and sys.stdout.isatty():
        print(heading)


def _request(arguments: argparse.Namespace) -> pb.ListTracesRequest:
    return pb.ListTracesRequest(
        limit=arguments.limit or 0,
        trigger=arguments.trigger or "",
        verdict=arguments.verdict or "",
        service=arguments.service or "",
        since_ns=0 if arguments.last is None else time.time_ns() - arguments.last,
    )


_TRACES_HEADING = f"{'TRACE':<32}  {'BEGAN':<19}  {'VERDICT':<11} {'NODES':>5} {'APP SPANS':>9} {'TOOK':>10}  TRIGGERS"


def _line(summary: Json) -> str:
    triggers = ",".join(sorted({trigger["name"] for trigger in summary["triggers"]}))
    began = "-"
    if summary["start_ns"]:
        began = (
            datetime.fromtimestamp(summary["start_ns"] / 1e9, UTC)
            .astimezone()
            .strftime("%Y-%m-%d %H:%M:%S")
        )
    return (
        f"{summary['trace_id']}  {began:<19}  {summary['verdict']['kind']:<11}"
        f" {len(summary['nodes']):>5} {summary['span_count']:>9}"
        f" {milliseconds(summary['end_ns'] - summary['start_ns']):>10}  {cut(triggers, 60)}"
    )


def _list(arguments: argparse.Namespace, found: Iterator[pb.TraceSummary]) -> int:
    """Print them; how many there were, up to the limit."""
    _print_heading(arguments, _TRACES_HEADING)
    number = 0
    for number, summary in enumerate(found, 1):
        line = summary_json(summary)
        if arguments.json:
            _print_json(line)
        else:
            print(_line(line))
        # Who follows sees each at once, also through a pipe.
        sys.stdout.flush()
        if number == arguments.limit:
            break
    return number


def _traces(arguments: argparse.Namespace) -> int:
    with CoordinatorClient(arguments.coordinator) as coordinator:
        number = _list(arguments, coordinator.traces(_request(arguments)))
    if not number and not arguments.json:
        sys.stderr.write("backsightctl: no trace was found\n")
    return 0


def _tail(arguments: argparse.Namespace) -> int:
    request = pb.ListTracesRequest(trigger=arguments.trigger or "", verdict=arguments.verdict or "")
    with (
        CoordinatorClient(arguments.coordinator) as coordinator,
        contextlib.suppress(KeyboardInterrupt),
    ):
        _list(arguments, coordinator.tail(request))
    return 0


def _snapshot(arguments: argparse.Namespace) -> int:
    request = pb.SnapshotRequest(
        age_ns=arguments.last, service=arguments.service or "", bytes_max=arguments.bytes
    )
    last = pb.SnapshotProgress()
    with CoordinatorClient(arguments.coordinator) as coordinator, progress_bar() as draw:
        for last in coordinator.snapshot(request):
            # Half of the way is to trigger, the other to collect and judge.
            share = 0.5 * last.nodes_done / max(1, last.nodes)
            share += 0.5 * last.judged / max(1, last.traces) if last.traces else share
            draw(
                min(1.0, share),
                f"{last.nodes_done} of {last.nodes} nodes, {last.judged} of {last.traces} traces,"
                f" {last.bytes / (1 << 20):.1f} MiB",
            )
    missing = last.found - last.fired
    if arguments.json:
        _print_json(
            {
                "trigger": last.trigger,
                "nodes": last.nodes,
                "nodes_done": last.nodes_done,
                "nodes_lost": list(last.nodes_lost),
                "found": last.found,
                "fired": last.fired,
                "bytes": last.bytes,
                "traces": last.traces,
                "judged": last.judged,
            }
        )
    else:
        print(f"{last.traces} traces; see them with: backsightctl traces --trigger {last.trigger}")
        if missing:
            print(
                f"{missing} more were left where they are, for --bytes {arguments.bytes}"
                " (a trace counts on each node that has a part of it)"
            )
        for node in last.nodes_lost:
            print(f"node {printable(node)} left before it was done")
    if last.nodes == 0:
        sys.stderr.write("backsightctl: no node is connected\n")
    return 0 if last.nodes and not last.nodes_lost else 1


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


def _show(arguments: argparse.Namespace) -> int:
    trace = parse_trace_id(arguments.trace)
    if arguments.node is not None:
        view = NodeClient(arguments.node).peek(trace)
    else:
        with CoordinatorClient(arguments.coordinator) as coordinator:
            view = trace_view(coordinator.trace(trace))
    if arguments.json:
        _print_json(view.to_json())
    else:
        print("\n".join(waterfall(view)))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    is_chosen = arguments.limit is not None or request != pb.ListTracesRequest()
    if bool(arguments.traces) == is_chosen:
        raise ValueError(
            "export: name traces, or choose them by --limit, --trigger, --verdict, --service, --last"
        )
    if arguments.json and arguments.output is None:
        raise ValueError(
            "export: --json wants --output FILE, for standard output has the traces else"
        )
    named = [parse_trace_id(text) for text in arguments.traces]
    traces = spans = 0

    def collected(coordinator: CoordinatorClient) -> Iterator[StampedTrace]:
        nonlocal traces, spans
        # All at once: to read them may take longer than a listing may.
        chosen = named or [TraceId(found.trace) for found in list(coordinator.traces(request))]
        for trace in chosen:
            try:
                detail = coordinator.trace(trace)
            except NotFound:
                if named:
                    raise
                continue  # deleted since it was listed
            result = stamped(detail, one_clock=on_one_clock(arguments.format))
            traces += 1
            spans += result.span_count
            yield result

    with CoordinatorClient(arguments.coordinator) as coordinator:
        write_export(collected(coordinator), arguments.format, arguments.output)
    if arguments.json:
        _print_json(
            {
                "output": str(arguments.output),
                "format": arguments.format,
                "traces": traces,
                "spans": spans,
            }
        )
    else:
        sys.stderr.write(f"backsightctl: exported {traces} traces, {spans} spans\n")
    return 0


_NODES_HEADING = f"{'NODE':<40} {'STATE':<10} {'PROTOCOL':<8} {'CLOCK':<28} ADDRESSES"


def _nodes(arguments: argparse.Namespace) -> int:
    with CoordinatorClient(arguments.coordinator) as coordinator:
        nodes = coordinator.nodes()
    _print_heading(arguments, _NODES_HEADING)
    for node in nodes:
        if arguments.json:
            _print_json(
                {
                    "node": node.node,
                    "node_id": f"{node.node_id:016x}",
                    "connected": node.connected,
                    "addresses": list(node.addresses),
                    "clock_offset_ns": node.clock_offset_ns,
                    "clock_error_ns": node.clock_error_ns,
                    "protocol": node.protocol,
                    "features": node.features,
                }
            )
        else:
            clock = (
                f"{node.clock_offset_ns / 1e6:+.3f} ms +- {node.clock_error_ns / 1e6:.3f} ms"
                if node.clock_error_ns
                else "not measured"
            )
            state = "connected" if node.connected else "gone"
            protocol = node.protocol or "-"
            addresses = printable(" ".join(node.addresses))
            print(f"{printable(node.node):<40} {state:<10} {protocol:<8} {clock:<28} {addresses}")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    status = NodeClient(arguments.node or _DEFAULT_NODE).status()
    if arguments.json:
        _print_json(status)
        return 0
    rows = list(_rows(status))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{printable(name):<{width}}  {_said(name, value)}")
    return 0


def _rows(section: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Figures by their path, those at the top first."""
    for name, value in section.items():
        if not isinstance(value, dict):
            yield prefix + name, value
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{prefix}{name}.")


def _said(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes") and value:
        return f"{value}  ({value / (1 << 20):.1f} MiB)"
    if isinstance(value, int) and name.endswith("_ns") and value:
        return f"{value}  ({milliseconds(value)})"
    return printable(str(value)) if value != "" else "-"


def _counters(arguments: argparse.Namespace) -> int:
    with CoordinatorClient(arguments.coordinator) as coordinator:
        counters = coordinator.counters()
    if arguments.json:
        _print_json(counters)
        return 0
    for name, value in counters.items():
        print(f"{printable(name):<40} {value}")
    return 0


def _trigger(arguments: argparse.Namespace) -> int:
    trace = parse_trace_id(arguments.trace)
    NodeClient(arguments.node or _DEFAULT_NODE).trigger(arguments.name, trace, arguments.why)
    if arguments.json:
        _print_json({"trigger": arguments.name, "trace_id": trace.hex(), "why": arguments.why})
    return 0


def _config_check(arguments: argparse.Namespace) -> int:
    kinds: list[str] = []
    problems: list[str] = []
    try:
        kinds = check(arguments.file, arguments.kind)
    except ConfigError as error:
        problems = error.problems
    if arguments.json:
        _print_json({"file": str(arguments.file), "valid_for": kinds, "problems": problems})
    elif problems:
        sys.stderr.write("".join(f"{printable(problem)}\n" for problem in problems))
    else:
        print(f"{arguments.file}: valid for {' and '.join(f'backsight-{kind}' for kind in kinds)}")
    return EXIT_CONFIG if problems else 0


def _doctor(arguments: argparse.Namespace) -> int:
    """Status 1 if something that is configured cannot work, 2 if the configuration is wrong."""
    works = True
    try:
        for found in examine(arguments.config):
            works = works and (found["ok"] or not found["is_needed"])
            if arguments.json:
                _print_json(found)
            else:
                print(in_words(found))
    except DoctorConfigError:
        return EXIT_CONFIG
    except DoctorError as error:
        sys.stderr.write(f"backsightctl: {error}\n")
        return 1
    return 0 if works else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="backsightctl", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help=f"default: $BACKSIGHT_COORDINATOR, or {_DEFAULT_COORDINATOR}",
    )
    parser.add_argument(
        "--node", metavar="SOCKET", help=f"ask a node on this machine (default {_DEFAULT_NODE})"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str,
        run: Callable[[argparse.Namespace], int],
        text: str,
        *,
        asks: Sequence[str] = ("coordinator",),
        of: Any = commands,  # noqa: ANN401 - argparse does not name its type
    ) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = of.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run, asks=asks, command=sub.prog.partition(" ")[2])
        sub.add_argument("--json", action="store_true", help="for programs")
        return sub

    traces = command("traces", _traces, "what the coordinator collected, newest first")
    export = command("export", _export, "collected traces as a file for another tool")
    export.add_argument("traces", nargs="*", metavar="TRACE", help="32 hex digits each")
    export.add_argument(
        "--format", choices=FORMATS, default="otlp-json", help="default: %(default)s"
    )
    export.add_argument("--output", type=Path, metavar="FILE", help="default: standard output")
    tail = command("tail", _tail, "traces from now on, as verdicts are given on them")
    tail.add_argument("--limit", type=_limit, default=0, metavar="N", help="end after N (0: never)")
    snapshot = command("snapshot", _snapshot, "collect what all pools hold of the last seconds")
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
        _show,
        "one trace over all its nodes; with --node, what that node holds",
        asks=("coordinator", "node"),
    )
    show.add_argument("trace", help="32 hex digits")
    command("nodes", _nodes, "the nodes that the coordinator knows")
    command("counters", _counters, "what the coordinator counted since its start")
    command("status", _status, "the node on this machine", asks=("node",))
    config = commands.add_parser("config", help="configuration files of the daemons")
    on_config = config.add_subparsers(required=True, metavar="COMMAND")
    check_help = "whether it is valid for a daemon, and if not, why"
    config_check = command("check", _config_check, check_help, asks=(), of=on_config)
    config_check.add_argument("file", type=Path, help="YAML")
    config_check.add_argument(
        "--kind", choices=SCHEMAS, help="what it is for (default: whose keys it has)"
    )
    doctor = command(
        "doctor", _doctor, "which kernel probes would work on this machine, by trying them", asks=()
    )
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="the node's; without it, all defaults"
    )
    trigger = command(
        "trigger", _trigger, "fire a trigger on the node on this machine", asks=("node",)
    )
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


_WHOM = {"coordinator": "the coordinator", "node": "the node on this machine"}


def _check_whom(arguments: argparse.Namespace) -> None:
    """ValueError if it was said whom to ask, and the command asks another; else fill that in."""
    given = [name for name in _WHOM if getattr(arguments, name) is not None]
    whom = " or ".join(_WHOM[name] for name in arguments.asks) or "nobody"
    for name in given:
        if name not in arguments.asks:
            raise ValueError(f"{arguments.command} asks {whom}: leave out --{name}")
    if len(given) > 1:
        raise ValueError(f"{arguments.command} asks {whom}: leave out --coordinator or --node")
    source = "--coordinator"
    if arguments.coordinator is None:
        source = "BACKSIGHT_COORDINATOR"
        arguments.coordinator = os.environ.get(source) or _DEFAULT_COORDINATOR
    if "coordinator" in arguments.asks and arguments.node is None:
        # gRPC would take a name without a port for one with 443.
        try:
            HostAndPort().admit(arguments.coordinator)
        except ValueError:
            raise ValueError(
                f"{source}: {arguments.coordinator!r}; allowed: {HostAndPort().allowed()}"
            ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        _check_whom(arguments)
        return run(arguments)
    except AskError as error:
        sys.stderr.write(f"backsightctl: {printable(str(error))}\n")
        return 1
    except ValueError as error:
        parser.error(str(error))


def program() -> int:
    """``main`` as a program of its own."""
    # `backsightctl traces | head` ends quietly.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return main()


if __name__ == "__main__":
    sys.exit(program())
