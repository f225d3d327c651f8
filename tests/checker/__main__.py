# SPDX-License-Identifier: Apache-2.0
"""Command line of the checker: ``python3 -m tests.checker --help``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from tests.checker.captured import read_captured
from tests.checker.errors import BadInput
from tests.checker.judge import Recording, Result, judge, selected_span_share
from tests.checker.recording import read_recording
from tests.checker.rule import Parameters, firing_spans, read_parameters

_RULES = Path(__file__).parent.parent / "data" / "nezha" / "rules.json"
# How many differences of a trace the text names before it only counts; --json has them all.
_SHOWN_DIFFERENCES = 5


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.checker",
        description="Judge collected traces against the recording that was replayed. "
        "Exit status: 0 good, 1 not, 2 bad input.",
    )
    parser.add_argument(
        "--file", type=Path, required=True, metavar="CSV[.xz]", help="the recording"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--captured",
        type=Path,
        metavar="DIR_OR_FILE",
        help="what backsightctl traces/show --json printed",
    )
    what.add_argument(
        "--select-only", action="store_true", help="only say which traces the latency rule selects"
    )
    parser.add_argument(
        "--rules",
        type=Path,
        default=_RULES,
        metavar="JSON",
        help="parameters of the latency rule (default: %(default)s)",
    )
    parser.add_argument(
        "--allow-overwritten",
        type=Path,
        metavar="FILE",
        help="trace ids, one per line, counted as overwritten",
    )
    parser.add_argument(
        "--allow-false-incoherent", action="store_true", help="complete traces may have any verdict"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _trace_ids(path: Path) -> frozenset[str]:
    try:
        ids = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    for trace_id in ids:
        if not re.fullmatch("[0-9a-f]{32}", trace_id):
            raise BadInput(
                f"{path}: {trace_id!r} is no trace id; want 32 lower-case hex digits a line"
            )
    return frozenset(ids)


def _print_selection(recording: Recording, parameters: Parameters, as_json: bool) -> None:
    fired = firing_spans(
        (span for spans in recording.values() for span in spans.values()), parameters
    )
    selected = frozenset(span.trace_id for span in fired)
    share, span_share = len(selected) / len(recording), selected_span_share(recording, selected)
    if as_json:
        print(
            json.dumps(
                {
                    "requests": len(recording),
                    "spans": sum(map(len, recording.values())),
                    "selected": len(selected),
                    "selected_share": share,
                    "selected_span_share": span_share,
                    "fired": [dataclasses.asdict(span) for span in fired],
                }
            )
        )
        return
    for span in fired:
        print(
            f"{span.trace_id} {span.span_id} {(span.end_ns - span.start_ns) / 1e6:10.3f} ms  "
            f"{span.pod}  {span.operation}"
        )
    print(
        f"selected {len(selected)} of {len(recording)} traces ({share:.2%}), "
        f"{span_share:.2%} of the spans; {len(fired)} spans fired"
    )


def _print_result(result: Result) -> None:
    for trace_id, trace in result.per_trace.items():
        state = (
            "complete"
            if trace.complete
            else f"{len(trace.differences)} differences"
            if trace.collected
            else "not collected"
        )
        why = "selected" if trace.selected else "not selected"
        print(f"{trace_id}  {why}, verdict {trace.verdict}, {state}")
        for difference in trace.differences[:_SHOWN_DIFFERENCES]:
            print(f"    {difference.kind} {difference.span_id}: {difference.detail}")
        if len(trace.differences) > _SHOWN_DIFFERENCES:
            print(f"    and {len(trace.differences) - _SHOWN_DIFFERENCES} more (--json has all)")
    whole = (
        "none collected"
        if result.coherent_by_checker is None
        else f"{result.coherent_by_checker:.2%}"
    )
    print(f"requests             {result.requests} ({result.spans} spans)")
    print(
        f"selected             {result.selected} ({result.selected_share:.2%}; "
        f"{result.selected_span_share:.2%} of the spans)"
    )
    print(f"collected            {result.collected} ({len(result.not_selected)} not selected)")
    print(f"recall               {result.recall:.2%}")
    print(f"coherent by checker  {whole}")
    print(f"false coherent       {result.false_coherent}")
    print(f"false incoherent     {result.false_incoherent}")
    print(f"without its trigger  {len(result.without_latency_trigger)}")
    print(f"excused              {len(result.excused)}")
    print(
        f"verdicts             {', '.join(f'{kind} {count}' for kind, count in result.verdicts.items()) or 'none'}"
    )
    for failure in result.failures:
        print(f"FAILED {failure}")


def main(argv: list[str] | None = None) -> int:
    """Runs the checker; returns its exit status."""
    arguments = _arguments(argv)
    try:
        recording = read_recording(arguments.file)
        parameters = read_parameters(arguments.rules, arguments.file)
        if arguments.select_only:
            _print_selection(recording, parameters, arguments.json)
            return 0
        fired = firing_spans(
            (span for spans in recording.values() for span in spans.values()), parameters
        )
        result = judge(
            recording,
            frozenset(span.trace_id for span in fired),
            read_captured(arguments.captured),
            overwritten=_trace_ids(arguments.allow_overwritten)
            if arguments.allow_overwritten
            else frozenset(),
            allow_false_incoherent=arguments.allow_false_incoherent,
        )
    except BadInput as error:
        print(f"checker: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        _print_result(result)
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
