# SPDX-License-Identifier: Apache-2.0
"""What a request of Jaeger's API is answered from; for both versions of that API."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from coordinator.answers import trace_detail
from coordinator.index.asking import IndexReader, Listing, Search
from coordinator.store.reader import StoreReader
from coordinator.web.parameters import Parameters, Refused
from formats.stamped import StampedTrace, stamped
from protocol.messages import TraceId
from runtime.log import Log

Json = dict[str, Any]
_Row = TypeVar("_Row")

LIMIT = 100
"""Of traces, as with Jaeger, where nothing is said."""

LIMIT_MAX = 1500
"""What Jaeger UI lets choose at most."""

# Traces of one answer, as nodes wrote them, which is 30,000 spans or so. As objects and
# JSON they take 50 times as much; so few answers are made at a time.
BYTES_MAX = 8 << 20


def search_only(search: Search) -> Search:
    """What can be searched for; Refused if nothing can be it."""
    if search.start_max_ns < search.start_min_ns:
        raise Refused(400, "the end of the time range is before its start")
    if search.duration_max_ns < search.duration_min_ns:
        raise Refused(400, "'maxDuration' should be greater than 'minDuration'")
    return replace(search, limit=min(search.limit, LIMIT_MAX))


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, with what it is answered from."""

    reader: StoreReader
    parameters: Parameters
    path: tuple[str, ...]  # what stands for the stars of the route
    now_ns: int
    log: Log
    said_cut: set[str]  # of which lists it is logged that they are cut

    @property
    def searches(self) -> IndexReader:
        """What can be asked of the index."""
        return IndexReader(self.reader.connection)

    def listed(self, what: str, listing: Listing[_Row]) -> list[_Row]:
        """What there is of a list. That it is cut is logged once: who asks for it asks often."""
        if listing.is_cut and what not in self.said_cut:
            self.said_cut.add(what)
            self.log.warning(
                f"Jaeger's list of {what} is cut after {len(listing.rows)}: there are more names than"
                " anybody reads; does an application put ids into them?"
            )
        return listing.rows

    def traces(
        self, ids: Iterable[TraceId], form: Callable[[StampedTrace], Json], *, raw: bool
    ) -> tuple[dict[TraceId, Json], dict[TraceId, Refused]]:
        """Those that are there, as many as may be in one answer, and why others are not in it."""
        shown: dict[TraceId, Json] = {}
        left_out: dict[TraceId, Refused] = {}
        left = BYTES_MAX
        for trace in dict.fromkeys(ids):
            size = sum(part.bytes for part in self.reader.slices(trace))
            if size > left:
                left_out[trace] = _too_large(trace, size)
                continue
            detail = trace_detail(self.reader, trace, left)
            if detail is None:
                continue
            left -= size
            try:
                read = stamped(detail, one_clock=not raw)
                if read.span_count:
                    shown[trace] = form(read)
            except Exception as error:  # noqa: BLE001 - what applications wrote must not stop the others
                self.log.warning(
                    f"trace {trace.hex()}: cannot be shown: {error!r}", trace_id=trace.hex()
                )
                left_out[trace] = Refused(
                    500, f"trace {trace.hex()} cannot be read; the coordinator's log says why"
                )
        return shown, left_out

    def trace(
        self, trace: TraceId, form: Callable[[StampedTrace], Json], *, raw: bool
    ) -> Json | None:
        """One, if it is there."""
        shown, left_out = self.traces([trace], form, raw=raw)
        if left_out:
            raise left_out[trace]
        return shown.get(trace)


def _too_large(trace: TraceId, size: int) -> Refused:
    limit = f"{BYTES_MAX >> 20} MiB"
    if size > BYTES_MAX:
        return Refused(413, f"trace {trace.hex()} has more than {limit}; use `backsightctl export`")
    return Refused(
        413,
        f"trace {trace.hex()} is left out, with which there were more than {limit}; ask for it alone",
    )
