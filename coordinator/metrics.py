# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of a coordinator: every figure of CoordinatorServer.status(), with its meaning."""

from __future__ import annotations

from runtime.metrics import Metric

PREFIX = "backsight_coordinator"

METRICS = (
    # Nodes.
    Metric("nodes_known", "Nodes that ever connected.", "now/nodes_known"),
    Metric("nodes_connected", "Nodes that are connected.", "now/nodes_connected"),
    Metric("streams_total", "Streams that nodes opened.", "server/streams"),
    Metric("hellos_refused_total", "Nodes that were refused.", "core/hellos_refused"),
    Metric(
        "streams_refused_total",
        "Streams that were ended for what their peer did: malformed messages, none that says who"
        " it is or what it asks, not reading, one that its certificate does not permit, or too many at once.",
        {
            "server/malformed": {"reason": "malformed"},
            "server/no_hello": {"reason": "no_hello"},
            "server/no_opening": {"reason": "no_opening"},
            "server/no_question": {"reason": "no_question"},
            "server/not_reading": {"reason": "not_reading"},
            "server/not_permitted": {"reason": "not_permitted"},
            "server/too_many_calls": {"reason": "too_many_calls"},
        },
    ),
    Metric(
        "connections_ended_total",
        "Connections that were ended for what came on them: a message that is not whole, too much"
        " of it or for too long, far too many calls, or nothing while their address has many.",
        {
            "server/connections_ended_unfinished": {"reason": "unfinished"},
            "server/connections_ended_calls": {"reason": "calls"},
            "server/connections_ended_idle": {"reason": "idle"},
        },
    ),
    Metric(
        "addresses_barred_total",
        "Addresses from which no connection was taken for 30 s, after one was ended for its calls.",
        "server/addresses_barred",
    ),
    Metric(
        "certificate_expires_seconds",
        "When the certificate in use is over, at listen and at query.listen, in seconds since 1970;"
        " 0 without TLS.",
        "certificate_expires_s/{of}",
    ),
    Metric(
        "unsendable_messages_total",
        "Messages to nodes that would break the protocol, and were left out.",
        "server/unsendable",
    ),
    Metric(
        "messages_not_heard_total",
        "Messages of nodes about traces that the store cannot read, which they say again a minute"
        " later.",
        "server/not_heard",
    ),
    Metric(
        "tail_overflows_total",
        "Traces that `backsightctl tail` was not shown, since its reader was too slow.",
        "server/tail_overflowed",
    ),
    Metric(
        "unexpected_messages_total",
        "Messages of nodes that are not connected, or that were due before.",
        "core/messages_unexpected",
    ),
    Metric(
        "unknown_messages_total",
        "Messages of nodes of a kind that this coordinator does not know, and ignores.",
        "core/messages_unknown",
    ),
    Metric(
        "clock_replies_refused_total",
        "Answers to clock probes that cannot be right.",
        "core/clock_replies_refused",
    ),
    # Traces and verdicts.
    Metric("triggers_total", "Triggers reported by nodes, repetitions included.", "core/triggers"),
    Metric(
        "trigger_reports_total",
        "Triggers reported by nodes, repetitions included, by the trigger's name.",
        "core/by_trigger/{trigger}/reports",
    ),
    Metric(
        "traces_collected_total",
        "Traces that were triggered, neighbours included; one with triggers of several names"
        " counts for each of them.",
        "core/by_trigger/{trigger}/traces",
    ),
    Metric(
        "traces",
        "Traces in memory: open wait for something, settled have their verdict and may still"
        " grow, closed are remembered by their outcome.",
        {
            "now/traces_open": {"state": "open"},
            "now/traces_settled": {"state": "settled"},
            "now/traces_closed": {"state": "closed"},
        },
    ),
    Metric("groups", "Triggered traces with their neighbours, in memory.", "now/groups"),
    Metric(
        "groups_abandoned_total",
        "Triggered traces that nodes gave up under overload.",
        "core/groups_abandoned",
    ),
    Metric(
        "groups_given_up_total",
        "Triggered traces that the coordinator gave up, with their neighbours: it had no room for"
        " them, or their node fired too many.",
        "core/groups_given_up",
    ),
    Metric(
        "firings_left_out_total",
        "Firings that named more traces for a group that is known, by nodes that fire too much.",
        "core/firings_left_out",
    ),
    Metric(
        "abandonments_refused_total",
        "Triggered traces that a node gave up in which it has no part.",
        "core/abandonments_refused",
    ),
    Metric(
        "verdicts_total",
        "Verdicts by kind. A trace counts once for each version of its verdict.",
        "core/verdicts/{kind}",
    ),
    Metric(
        "verdict_reasons_total",
        "Verdicts that have such a reason not to be coherent.",
        "core/reasons/{reason}",
    ),
    Metric(
        "traces_closed_total",
        "Traces by the kind of verdict that they were closed with. One that came up again"
        " counts once more.",
        "core/closed/{kind}",
    ),
    Metric(
        "traversal_seconds",
        "From the first report of a trace to the last that told something new, before its first"
        " final verdict.",
        "traversal",
        histogram=True,
    ),
    Metric(
        "verdict_seconds",
        "From the first report of a trace to its first final verdict.",
        "verdict",
        histogram=True,
    ),
    Metric(
        "traces_finished_early_total",
        "Traces closed before their time, to keep within a bound.",
        "core/traces_finished_early",
    ),
    Metric("traces_late_total", "Closed traces that bytes or doubts came for.", "core/traces_late"),
    # Slices and memory.
    Metric(
        "memory_capacity_bytes",
        "What the bytes of slices that are not durable, and credit for more, may take.",
        "limits/memory_bytes",
    ),
    Metric(
        "memory_bytes",
        "Bytes of slices that are not durable, and what nodes may send beyond.",
        "now/memory_bytes",
    ),
    Metric("undurable_bytes", "Bytes of slices that are not durable.", "now/undurable_bytes"),
    Metric(
        "streams_waiting",
        "Streams of slices that wait for memory, to be allowed to send.",
        "now/streams_waiting",
    ),
    Metric(
        "slice_bytes_dropped_total",
        "Bytes of slices beyond slice_bytes_max.",
        "core/bytes_over_slice_max",
    ),
    Metric(
        "chunks_refused_total",
        "Pieces of slices that were not taken: of a stream that may not send, over its credit, or"
        " with a gap before.",
        {
            "core/chunks_unwelcome": {"reason": "unwelcome"},
            "core/chunks_over_credit": {"reason": "over_credit"},
            "core/chunks_with_gap": {"reason": "gap"},
        },
    ),
    # Queues and the store.
    Metric("writes_waiting", "Writes that are not durable.", "queues/writes"),
    Metric("answers_waiting", "Answers to nodes that wait for writes.", "now/answers_waiting"),
    Metric("messages_waiting_bytes", "Messages that wait to be sent.", "queues/messages_bytes"),
    Metric("store_capacity_bytes", "What the store may take.", "limits/store_bytes"),
    Metric("store_bytes", "Of the store's file that hold something.", "stored_bytes"),
    Metric(
        "assembly_bytes",
        "Stored of traces that are not closed, and cannot be deleted.",
        "now/assembly_bytes",
    ),
    Metric(
        "pinned_capacity_bytes",
        "What operators may pin of the store, in all.",
        "limits/pinned_bytes",
    ),
    Metric("pinned_bytes", "What is pinned.", "pinned/bytes"),
    Metric("pinned_traces", "Traces that are pinned.", "pinned/traces"),
    Metric(
        "traces_deleted_total",
        "Traces deleted, by why: older than they may get, for bytes_max, for those that come where the"
        " disk is full, or by an operator.",
        "store/deleted/{reason}",
    ),
    Metric(
        "store_commit_seconds",
        "How long transactions of what nodes say took, with the wait for the disk.",
        "commit",
        histogram=True,
    ),
    Metric(
        "journal_bytes",
        "Size of the journals (WAL) beside the store's file, and beside those of the index and of"
        " exports.",
        "journal_bytes/{of}",
    ),
    Metric(
        "store_bytes_cut_total",
        "Bytes not stored, since what comes before them was deleted.",
        "store/bytes_cut",
    ),
    Metric(
        "store_writes_failed_total",
        "Transactions that failed, and are tried again.",
        "store/writes_failed",
    ),
    Metric(
        "store_records_left_out_total",
        "Records that no store can take: a defect. Each is left out, and nobody waits for it.",
        "store/records_left_out",
    ),
    Metric(
        "store_disk_full_total",
        "Times that the disk was full, and room was made within the store's file.",
        "store/disk_full",
    ),
    Metric(
        "store_has_reserve",
        "1: the disk has room for the file that is given up when it is full.",
        "store_has_reserve",
    ),
    Metric(
        "loop_lag_seconds",
        "How late a timer of the event loop fires, of which there is one a second: for so long"
        " nothing else was done either.",
        "loop_lag",
        histogram=True,
    ),
    # The process that reads the store.
    Metric(
        "reading_cpu_seconds_total",
        "CPU time of the process for searches and exports.",
        "reading/cpu_s",
    ),
    Metric(
        "reading_resident_memory_bytes",
        "Memory of the process for searches and exports; some of it shared with the coordinator.",
        "reading/resident_bytes",
    ),
    # Export by OTLP.
    Metric(
        "export_traces_waiting",
        "Traces that wait to be exported, when the last one was begun.",
        "queues/export_traces",
    ),
    Metric(
        "exported_traces_total",
        "Traces exported, by what the receiver made of them: refused ones are not sent again.",
        {
            "export/traces": {"outcome": "taken"},
            "export/traces_refused": {"outcome": "refused"},
        },
    ),
    Metric(
        "exported_spans_total",
        "Spans exported, by what the receiver made of them: rejected ones in a request of which"
        " it took others, refused ones in a request of which it took nothing.",
        {
            "export/spans": {"outcome": "taken"},
            "export/spans_rejected": {"outcome": "rejected"},
            "export/spans_refused": {"outcome": "refused"},
        },
    ),
    Metric(
        "export_slices_incomplete_total",
        "Slices of which not all was sent: they are too long, or what they say could not be read.",
        {
            "export/slices_cut": {"reason": "too_long"},
            "export/slices_unreadable": {"reason": "unreadable"},
        },
    ),
    Metric("export_requests_total", "Requests to the receiver.", "export/requests"),
    Metric(
        "export_requests_retried_total",
        "Requests that failed, and are tried again.",
        "export/requests_retried",
    ),
    Metric(
        "export_request_bytes_total",
        "Sent to the receiver, before compression.",
        "export/request_bytes",
    ),
    # The index of searches.
    Metric(
        "index_changes_waiting",
        "Changes of traces that the index does not have yet.",
        "queues/index_changes",
    ),
    Metric(
        "index_waiting_seconds",
        "For how long the first of them has waited.",
        "queues/index_s",
    ),
    Metric(
        "traces_indexed_total",
        "Traces made ready for searches, once for each version of their verdict.",
        "index/traces_indexed",
    ),
    Metric(
        "traces_not_indexed_total",
        "Traces that no search finds, since what they say could not be read.",
        "index/traces_failed",
    ),
    Metric(
        "index_busy_seconds_total",
        "CPU time that went into reading traces for the index.",
        "index/busy_us",
        scale=1e-6,
    ),
)

SUMS: frozenset[str] = frozenset()
"""Figures that are sums of others, and so no metrics of their own."""
