# SPDX-License-Identifier: Apache-2.0
"""An export opens in Perfetto's own trace processor, and has there what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from formats import stamped as names
from formats.perfetto import PerfettoWriter
from formats.stamped import stamped
from protocol.messages import TraceId
from testbed.venvs import made_once, run
from tests.export.collected import BEGIN_NS, EVENTS, FLOWS, MS, SPANS, detail

_HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def perfetto_python() -> Path:
    return made_once("perfetto", _HERE / "requirements.txt")


def ask(python: Path, file: Path, *queries: str) -> list[Any]:
    output = run([python, _HERE / "query.py", file, *queries], file.parent)
    # What the engine itself says comes first.
    return [json.loads(line) for line in output.splitlines()[-len(queries) :]]


def test_slices_and_flows_are_counted_by_perfetto_itself(
    perfetto_python: Path, tmp_path: Path
) -> None:
    later = detail(TraceId(bytes(15) + b"\x01"))
    for part in later.slices:
        part.clock_offset_ns -= 1000 * MS
    writer = PerfettoWriter()
    traces = [stamped(one, one_clock=True) for one in (detail(), later)]
    file = tmp_path / "trace.pftrace"
    file.write_bytes(b"".join(map(writer.write, traces)))
    counted, instants, flows, processes, nested, unfinished, said, errors = ask(
        perfetto_python,
        file,
        "select count(*) from slice where category = 'span'",
        "select count(*) from slice where category = 'event'",
        "select f.name f, f_process.name fp, t.name t, t_process.name tp from flow"
        " join slice f on f.id = slice_out join process_track ft on ft.id = f.track_id"
        " join process f_process on f_process.upid = ft.upid"
        " join slice t on t.id = slice_in join process_track tt on tt.id = t.track_id"
        " join process t_process on t_process.upid = tt.upid",
        "select name, count(*) n from process where name is not null group by name order by name",
        "select child.name child, parent.name parent from slice child join slice parent"
        " on child.parent_id = parent.id where child.category = 'span' order by child.ts",
        "select count(*) from slice where dur = -1",
        "select ts, dur, extract_arg(arg_set_id, 'debug.rpc_system') system,"
        f" extract_arg(arg_set_id, 'debug.{names.TRIGGER.replace('.', '_')}') fired from slice"
        " where name = 'stock.Stock/Reserve' order by ts limit 1",
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
    )
    assert counted == [[2 * SPANS]]
    assert instants == [[2 * EVENTS]]
    assert sorted(flows) == sorted(
        [
            ["POST cart", "front on edge", "POST /cart", "cart on back"],
            ["Reserve", "cart on back", "stock.Stock/Reserve", "stock on back"],
        ]
        * 2
    )
    assert len(flows) == 2 * FLOWS
    assert processes == [[name, 1] for name in ("cart on back", "front on edge", "stock on back")]
    assert sorted(nested) == sorted([["POST cart", "GET /buy"], ["redis GET", "POST /cart"]] * 2)
    assert unfinished == [[2]]
    assert said == [[BEGIN_NS + 40 * MS, 20 * MS, "grpc", "error"]]
    assert errors == []
