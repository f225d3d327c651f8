# SPDX-License-Identifier: Apache-2.0
"""Draws a trace on the terminal: a bar a span, over all nodes, on one clock."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from ctl.trace import Json, Placed, TraceView, in_tree_order
from runtime.printable import printable

_BAR_WIDTH_MIN = 20
_NAME_WIDTH_MAX = 44
_NODE_WIDTH_MAX = 22
_STACK_WIDTH_MAX = 160

# A line of a terminal has room for few; all of them are in the JSON.
_LATERALS_MAX = 3

# To see what kind of bytes these are; all of them are in the JSON.
_RECORDS_MAX = 20
_RECORD_WIDTH_MAX = 80

# The longest waits explain most; all of them are in the JSON.
_KERNEL_MAX = 20
_KERNEL_WIDTH_MAX = 160

_LINE_BREAKS = re.compile(r"[\r\n\t]+")


def milliseconds(duration_ns: int) -> str:
    """A duration with three significant digits or so."""
    value = duration_ns / 1e6
    return (
        f"{value:.0f} ms"
        if value >= 100
        else f"{value:.1f} ms"
        if value >= 1
        else f"{value:.3f} ms"
    )


def ago(duration_ns: int) -> str:
    """How long something lasts, in the largest unit of which that is two or more."""
    seconds = max(0, duration_ns) // 10**9
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def cut(text: str, width: int) -> str:
    """The text in so many columns, made printable: a name may hold anything."""
    text = printable(_LINE_BREAKS.sub(" ", text))
    return text if len(text) <= width else text[: width - 1] + "~"


def headline(summary: Json) -> Iterator[str]:
    """Why the trace is there and what is missing of it."""
    verdict = summary["verdict"]
    pinned = ", pinned" if summary["pinned"] else ""
    yield f"trace {summary['trace_id']}  {verdict['kind']} (version {verdict['version']}){pinned}"
    for trigger in summary["triggers"]:
        yield from _trigger(trigger, summary["trace_id"])
    if summary["triggers_omitted"]:
        yield f"  and {summary['triggers_omitted']} more triggers"
    for reason in verdict["reasons"]:
        where = f" on {reason['node']}" if reason["node"] else ""
        yield f"  {reason['kind']}{where}: {cut(reason['detail'], 160)}"


def _trigger(trigger: Json, trace: str) -> Iterator[str]:
    """A trigger, seen from a trace that it struck, or from one that it names beside."""
    laterals, primary = trigger["laterals"], trigger["primary"]
    is_own = primary in {"", trace}
    if not is_own:
        part = f", lateral of {primary}"
    elif laterals:
        part = f", with {len(laterals)} lateral{'s' if len(laterals) > 1 else ''}"
    else:
        part = ""
    why = cut(trigger["why"], 100)
    yield f"  trigger {trigger['name']} on {trigger['node']}{part}" + (f": {why}" if why else "")
    if is_own and laterals:
        more = len(laterals) - _LATERALS_MAX
        yield f"    laterals: {', '.join(laterals[:_LATERALS_MAX])}" + (
            f" and {more} more" if more > 0 else ""
        )


def waterfall(view: TraceView, width: int | None = None) -> Iterator[str]:
    """The lines of the picture, ``width`` columns wide (None: the terminal's)."""
    yield from headline(view.summary)
    spans = view.spans
    if not spans:
        # What is missing has its reasons in the head.
        is_explained = view.summary["verdict"]["reasons"] or not view.slices
        if is_explained or any(part.bytes for part in view.slices):
            yield "  no spans"
        else:
            yield "  nothing: reported before, evicted, or not written yet"
        yield from _records(view)
        return
    if width is None:
        try:
            width = os.get_terminal_size().columns
        except OSError:
            width = 120
    begin_ns = min(placed.start_ns for placed in spans)
    end_ns = max(
        placed.end_ns if placed.end_ns is not None else placed.start_ns for placed in spans
    )
    total_ns = max(end_ns - begin_ns, 1)
    rows = list(in_tree_order(spans))
    node_width = min(_NODE_WIDTH_MAX, max(len(p.part.node) for _, p in rows))
    name_width = min(_NAME_WIDTH_MAX, max(len(p.span.name) + depth for depth, p in rows))
    bar_width = max(_BAR_WIDTH_MIN, width - node_width - name_width - 16)
    delivered = {placed.span.span_id: placed for placed in spans}

    yield f"  {len(spans)} spans on {len(view.slices)} nodes in {milliseconds(total_ns)}"
    for depth, placed in rows:
        indent = " " * min(depth, name_width // 2)
        name = cut(indent + placed.span.name, name_width)
        yield (
            f"  {cut(placed.part.node, node_width):<{node_width}} {name:<{name_width}} "
            f"|{_bar(placed, begin_ns, total_ns, bar_width)}| {_duration(placed):>9}"
            f"{_remark(placed, delivered)}"
        ).rstrip()
    for part in view.slices:
        if not part.content.spans:
            yield f"  {cut(part.node, node_width):<{node_width}} no spans, {part.bytes} bytes"
    yield from _kernel(spans, begin_ns)
    yield from _records(view)
    yield from _exceptions(spans)


def _kernel(spans: Sequence[Placed], begin_ns: int) -> Iterator[str]:
    """What the kernel says of its spans, the longest ones, as they began."""
    told = [placed for placed in spans if "kernel.what" in placed.span.attributes]
    if not told:
        return
    yield "  seen by the kernel"
    told.sort(key=lambda placed: placed.start_ns - (placed.end_ns or placed.start_ns))
    for placed in sorted(told[:_KERNEL_MAX], key=lambda placed: placed.start_ns):
        at = f"+{milliseconds(placed.start_ns - begin_ns)}"
        what = str(placed.span.attributes["kernel.what"])
        yield f"    {at:>10}  {cut(f'{placed.part.node}: {what}', _KERNEL_WIDTH_MAX)}"
    if len(told) > _KERNEL_MAX:
        yield f"    and {len(told) - _KERNEL_MAX} shorter ones; see --json"


def _records(view: TraceView) -> Iterator[str]:
    """What the application wrote in its own bytes, the first ones of it."""
    records = view.to_json()["records"]
    if not records:
        return
    yield f"  {len(records)} records of the application's own"
    begin_ns = min((r["time_ns"] for r in records if r["time_ns"] is not None), default=0)
    for record in records[:_RECORDS_MAX]:
        at = "?" if record["time_ns"] is None else f"+{milliseconds(record['time_ns'] - begin_ns)}"
        said = record["text"] if record["text"] is not None else record["hex"]
        yield f"    {at:>10}  {record['bytes']:>6} bytes  {cut(said, _RECORD_WIDTH_MAX)}"
    if len(records) > _RECORDS_MAX:
        yield f"    and {len(records) - _RECORDS_MAX} more; see --json"


def _exceptions(spans: Sequence[Placed]) -> Iterator[str]:
    """What was thrown, with its stack; an exception that passed through several spans once."""
    seen: set[tuple[str, str]] = set()
    # Those that began last are nearest to where it was thrown.
    for placed in reversed(spans):
        for event in placed.span.events:
            if event.name != "exception":
                continue
            thrown, stack = (
                str(event.attributes.get(f"exception.{key}", "")) for key in ("type", "stacktrace")
            )
            message = str(event.attributes.get("exception.message", ""))
            if (thrown, message) in seen:
                continue
            seen.add((thrown, message))
            where = f"{thrown} on {placed.part.node}, in {placed.span.name}: {message}"
            yield f"  {cut(where, _STACK_WIDTH_MAX)}"
            for line in stack.expandtabs().splitlines():
                yield f"    {cut(line, _STACK_WIDTH_MAX)}"


def _bar(placed: Placed, begin_ns: int, total_ns: int, width: int) -> str:
    left = min((placed.start_ns - begin_ns) * width // total_ns, width - 1)
    if placed.end_ns is None:
        return " " * left + "?" * (width - left)
    length = max(1, (placed.end_ns - placed.start_ns) * width // total_ns)
    length = min(length, width - left)
    return " " * left + "=" * length + " " * (width - left - length)


def _duration(placed: Placed) -> str:
    if placed.end_ns is None:
        return "?"
    return milliseconds(placed.end_ns - placed.start_ns)


def _remark(placed: Placed, delivered: dict[int, Placed]) -> str:
    remarks: list[str] = []
    if placed.span.unfinished:
        remarks.append("unfinished")
    if placed.span.status == 2:
        remarks.append("error")
    parent_id = placed.span.parent_id
    parent = delivered.get(parent_id)
    if parent_id and parent is None:
        remarks.append(f"parent {parent_id:016x} missing")
    elif parent is not None and placed.part is not parent.part:
        error_ns = placed.part.clock_error_ns + parent.part.clock_error_ns
        if placed.start_ns + error_ns < parent.start_ns:
            remarks.append(
                f"starts {milliseconds(parent.start_ns - placed.start_ns)} before its caller"
            )
    return "  " + ", ".join(remarks) if remarks else ""
