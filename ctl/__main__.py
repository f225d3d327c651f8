# SPDX-License-Identifier: Apache-2.0
"""``backsightctl``: what was collected, why, and whether it is whole.

Exit status: 0 done; 1 not found, or nobody answered; 2 wrong usage, or a bad configuration.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import backsight_pb2 as pb

from ctl.arguments import DEFAULT_NODE, argument_parser, parsed, settle_whom
from ctl.config import check, has_keys
from ctl.coordinator import AskError, CoordinatorClient, NotFound
from ctl.doctor import DoctorConfigError, DoctorError, examine, in_words
from ctl.export import on_one_clock, write_export
from ctl.making import make_authority, make_client, make_coordinator
from ctl.node import Held, NodeClient
from ctl.progress import progress_bar
from ctl.trace import Json, flag_names, summary_json, trace_view
from ctl.waterfall import ago, cut, milliseconds, waterfall
from formats.stamped import StampedTrace, stamped
from protocol.messages import TraceId
from protocol.tokens import drawn, line_of
from protocol.wire import parse_trace_id
from runtime.printable import printable
from runtime.schema import EXIT_CONFIG, ConfigError
from runtime.tls import moment_in_words


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
        pinned=getattr(arguments, "pinned", False),
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
        + ("  (pinned)" if summary["pinned"] else "")
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
    with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
        number = _list(arguments, coordinator.traces(_request(arguments)))
    if not number and not arguments.json:
        sys.stderr.write("backsightctl: no trace was found\n")
    return 0


def _tail(arguments: argparse.Namespace) -> int:
    request = pb.ListTracesRequest(trigger=arguments.trigger or "", verdict=arguments.verdict or "")
    with (
        CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator,
        contextlib.suppress(KeyboardInterrupt),
    ):
        _list(arguments, coordinator.tail(request))
    return 0


def _snapshot(arguments: argparse.Namespace) -> int:
    request = pb.SnapshotRequest(
        age_ns=arguments.last, service=arguments.service or "", bytes_max=arguments.bytes
    )
    last = pb.SnapshotProgress()
    with (
        CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator,
        progress_bar() as draw,
    ):
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
            print(f"node {printable(node)} left, or said nothing more, before it was done")
    if last.nodes == 0:
        sys.stderr.write("backsightctl: no node is connected\n")
    return 0 if last.nodes and not last.nodes_lost else 1


def _show(arguments: argparse.Namespace) -> int:
    trace = parse_trace_id(arguments.trace)
    if arguments.node is not None:
        view = NodeClient(arguments.node).peek(trace)
    else:
        with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
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
    traces = spans = without_spans = 0

    def collected(coordinator: CoordinatorClient) -> Iterator[StampedTrace]:
        nonlocal traces, spans, without_spans
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
            # All formats are of spans: of others no tool could make anything.
            if not result.span_count:
                without_spans += 1
                continue
            traces += 1
            spans += result.span_count
            yield result

    with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
        write_export(collected(coordinator), arguments.format, arguments.output)
    if arguments.json:
        _print_json(
            {
                "output": str(arguments.output),
                "format": arguments.format,
                "traces": traces,
                "spans": spans,
                "without_spans": without_spans,
            }
        )
    else:
        left_out = f"; {without_spans} without a span were left out" if without_spans else ""
        sys.stderr.write(f"backsightctl: exported {traces} traces, {spans} spans{left_out}\n")
    return 0


def _pin(arguments: argparse.Namespace) -> int:
    trace = parse_trace_id(arguments.trace)
    pins = arguments.command == "pin"
    with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
        coordinator.pin(trace, unpin=not pins)
    if arguments.json:
        _print_json({"trace_id": trace.hex(), "pinned": pins})
    return 0


def _delete(arguments: argparse.Namespace) -> int:
    trace = parse_trace_id(arguments.trace)
    if not arguments.yes and not sys.stdin.isatty():
        raise ValueError("delete: nobody is there to be asked; give --yes")
    with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
        if not arguments.yes:
            print(_line(summary_json(coordinator.trace(trace).summary)))
            if input("Delete it for good? [y/N] ").strip().lower() not in ("y", "yes"):
                sys.stderr.write("backsightctl: nothing was deleted\n")
                return 1
        coordinator.delete(trace)
    if arguments.json:
        _print_json({"trace_id": trace.hex(), "deleted": True})
    return 0


_NODES_HEADING = (
    f"{'NODE':<40} {'SEEN':<12} {'VERSION':<10} {'PROTOCOL':<8} {'CLOCK':<28} ADDRESSES, IDENTITY"
)


def _nodes(arguments: argparse.Namespace) -> int:
    with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
        if arguments.forget is not None:
            coordinator.forget_node(arguments.forget)
            if arguments.json:
                _print_json({"forgotten": arguments.forget})
            return 0
        nodes = coordinator.nodes()
    _print_heading(arguments, _NODES_HEADING)
    for node in nodes:
        if arguments.json:
            _print_json(
                {
                    "node": node.node,
                    "node_id": f"{node.node_id:016x}",
                    "connected": node.connected,
                    "seen_ns": node.seen_ns,
                    "version": node.software,
                    "identity": node.identity,
                    "peer": node.peer,
                    "addresses": list(node.addresses),
                    "clock_offset_ns": node.clock_offset_ns,
                    "clock_error_ns": node.clock_error_ns,
                    "protocol": node.protocol,
                    "features": node.features,
                }
            )
        else:
            print(_node_line(node))
    if not nodes and not arguments.json:
        sys.stderr.write("backsightctl: no node has connected to this coordinator\n")
    return 0


def _node_line(node: pb.NodeStatus) -> str:
    clock = (
        f"{node.clock_offset_ns / 1e6:+.3f} ms +- {node.clock_error_ns / 1e6:.3f} ms"
        if node.clock_error_ns
        else "not measured"
    )
    seen = "connected" if node.connected else f"{ago(time.time_ns() - node.seen_ns)} ago"
    version = printable(node.software) or "-"
    # Where it is connected from, if it says no address.
    where = " ".join(node.addresses) or node.peer
    return (
        f"{printable(node.node):<40} {seen:<12} {version:<10} {node.protocol or '-':<8} {clock:<28}"
        f" {printable(' '.join(filter(None, (where, node.identity))))}"
    )


def _status(arguments: argparse.Namespace) -> int:
    if arguments.asked == "coordinator":
        with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
            status = coordinator.status(arguments.of or "")
    else:
        status = NodeClient(arguments.node or DEFAULT_NODE).status()
    if arguments.json:
        _print_json(status)
        return 0
    rows = list(_rows(status))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{printable(name):<{width}}  {_said(name, value)}")
    return 0


_HISTOGRAM = {"bounds", "counts", "sum"}  # counting.histogram.Histogram


def _rows(section: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Figures by their path, those at the top first."""
    for name, value in section.items():
        if not isinstance(value, dict):
            yield prefix + name, value
        elif value.keys() == _HISTOGRAM:
            yield prefix + name, _histogram(value)
    for name, value in section.items():
        if isinstance(value, dict) and value.keys() != _HISTOGRAM:
            yield from _rows(value, f"{prefix}{name}.")


def _histogram(value: Json) -> str:
    """How many values were how large, without those that there were none of."""
    upper = [*(f"up to {bound:g}" for bound in value["bounds"]), "more"]
    counts = zip(upper, value["counts"], strict=False)
    return "; ".join(f"{count} {what}" for what, count in counts if count)


def _said(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and "certificate_expires_s" in name.split("."):
        return _moment(value)
    if isinstance(value, int) and name.endswith("_bytes") and value:
        return f"{value}  ({value / (1 << 20):.1f} MiB)"
    if isinstance(value, int) and name.endswith("_ns") and value:
        return f"{value}  ({milliseconds(value)})"
    if isinstance(value, list):
        rows = (" ".join(f"{key}={what}" for key, what in row.items()) for row in value)
        return printable("; ".join(rows)) or "-"
    return printable(str(value)) if value != "" else "-"


def _moment(at_s: float) -> str:
    """Of a certificate's end; 0: there is none."""
    if not at_s:
        return "-"
    words = moment_in_words(datetime.fromtimestamp(at_s, UTC))
    return words if at_s > time.time() else f"{words}  (over)"


def _counters(arguments: argparse.Namespace) -> int:
    with CoordinatorClient(arguments.coordinator, arguments.tls) as coordinator:
        counters = coordinator.counters()
    if arguments.json:
        _print_json(counters)
        return 0
    for name, value in counters.items():
        print(f"{printable(name):<40} {value}")
    return 0


def _trigger(arguments: argparse.Namespace) -> int:
    trace = parse_trace_id(arguments.trace)
    node = NodeClient(arguments.node or DEFAULT_NODE)
    held = node.trigger(arguments.name, trace, arguments.why)
    if arguments.json:
        _print_json(
            {
                "trigger": arguments.name,
                "trace_id": trace.hex(),
                "why": arguments.why,
                "bytes_held": held.bytes if held is not None else None,
                "bytes_reported": held.reported_bytes if held is not None else None,
            }
        )
    else:
        print(f"triggered{_held_in_words(held)}")
    return 0


def _held_in_words(held: Held | None) -> str:
    if held is None:
        return "; what the node holds of it cannot be told now"
    why_not_all = ", ".join(flag_names(held.flags))
    return (
        f"; node {printable(held.node)} holds {f'{held.bytes} bytes' if held.bytes else 'nothing'} of it"
        + (f", and has reported {held.reported_bytes} bytes" if held.reported_bytes else "")
        + (f" ({why_not_all})" if why_not_all else "")
    )


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
        if not has_keys(arguments.file):
            print(f"{arguments.file}: no key is in force there, so all have their defaults")
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


def _token(arguments: argparse.Namespace) -> int:
    token = drawn()
    line = line_of(arguments.name, token)
    if arguments.json:
        _print_json({"token": token, "line": line})
    else:
        print(token, line, sep="\n")
        sys.stderr.write(
            "backsightctl: the first is for who shall read, as `Authorization: Bearer TOKEN`; the second"
            " is a line for the file that is `query.tokens` of the coordinator\n"
        )
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "traces": _traces,
    "export": _export,
    "tail": _tail,
    "snapshot": _snapshot,
    "show": _show,
    "nodes": _nodes,
    "pin": _pin,
    "unpin": _pin,
    "delete": _delete,
    "counters": _counters,
    "status": _status,
    "config check": _config_check,
    "doctor": _doctor,
    "token": _token,
    "pki init": make_authority,
    "pki coordinator": make_coordinator,
    "pki node": make_client,
    "pki operator": make_client,
    "pki viewer": make_client,
    "trigger": _trigger,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argument_parser(__doc__.splitlines()[0])
    arguments = parsed(parser, argv)
    try:
        settle_whom(arguments)
        return _COMMANDS[arguments.command](arguments)
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
