# SPDX-License-Identifier: Apache-2.0
"""``backsightctl export``: collected traces as a file for another tool."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from formats.jaeger import answer, trace_json
from formats.otlp_json import otlp_json
from formats.perfetto import PerfettoWriter
from formats.stamped import StampedTrace

_BINARY = ("perfetto",)


def _otlp_lines(traces: Iterable[StampedTrace]) -> Iterator[bytes]:
    """A TracesData a line, which is also what OpenTelemetry's file exporter writes."""
    for trace in traces:
        yield json.dumps(otlp_json(trace.otlp())).encode() + b"\n"


def _jaeger(traces: Iterable[StampedTrace]) -> Iterator[bytes]:
    """One object, written trace by trace."""
    head, tail = json.dumps(answer([None], 0)).split("[null]")
    yield head.encode() + b"["
    for number, trace in enumerate(traces):
        yield (b",\n" if number else b"\n") + json.dumps(trace_json(trace)).encode()
    yield b"\n]" + tail.encode() + b"\n"


def _perfetto(traces: Iterable[StampedTrace]) -> Iterator[bytes]:
    return map(PerfettoWriter().write, traces)


FORMATS: dict[str, Callable[[Iterable[StampedTrace]], Iterator[bytes]]] = {
    "otlp-json": _otlp_lines,
    "jaeger-json": _jaeger,
    "perfetto": _perfetto,
}


def on_one_clock(format_name: str) -> bool:
    """Whether a format is a picture; OTLP has the times as they were written."""
    return format_name != "otlp-json"


def write_export(traces: Iterable[StampedTrace], format_name: str, output: Path | None) -> None:
    """Write to a file, which is only there if all went well, or (None) to standard output.

    ValueError if a terminal would get what is no text.
    """
    with _opened(output, binary=format_name in _BINARY) as file:
        for piece in FORMATS[format_name](traces):
            file.write(piece)


@contextlib.contextmanager
def _opened(output: Path | None, *, binary: bool) -> Iterator[IO[bytes]]:
    if output is None:
        if binary and sys.stdout.isatty():
            raise ValueError("this format is no text: give --output FILE")
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    partial = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(output)
    except OSError as error:
        raise ValueError(f"--output {output}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
