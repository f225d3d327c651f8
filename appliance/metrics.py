# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of a node: every figure of Daemon.status(), with its meaning.

Names of triggers are labels, and bounded (counting.trigger_names), and names of
quotas, which are configured; nothing that there may be any number of is one.
"""

from __future__ import annotations

from runtime.metrics import Metric

PREFIX = "backsight_node"

_NS = 1e-9

METRICS = (
    # The pool, and what it holds.
    Metric("pool_capacity_bytes", "Memory that records may take, in all.", "dataplane/pool_bytes"),
    Metric(
        "pool_bytes",
        "Memory of the pool by what it is used for: stock was granted and is empty, active is"
        " being written, sealed is full, keep holds what got a second chance.",
        {
            "dataplane/stock_bytes": {"state": "stock"},
            "dataplane/active_bytes": {"state": "active"},
            "dataplane/sealed_bytes": {"state": "sealed"},
            "dataplane/keep_bytes": {"state": "keep"},
        },
    ),
    Metric(
        "quota_bytes",
        "Memory of the pool that nobody else can push out, of each user or group with a quota.",
        "quotas/{quota}/quota_bytes",
    ),
    Metric(
        "quota_held_bytes",
        "Memory of the pool that processes with a quota have; more than that while nobody else"
        " wants it.",
        "quotas/{quota}/held_bytes",
    ),
    Metric(
        "event_horizon_seconds",
        "How far back the pool reaches; 0 until it was full for the first time.",
        "dataplane/horizon_ns",
        scale=_NS,
    ),
    Metric(
        "segments_reclaimed_total", "Segments taken back from the oldest.", "dataplane/reclaims"
    ),
    Metric("runs_evicted_total", "Runs overwritten.", "dataplane/runs_evicted"),
    Metric(
        "second_chances_total",
        "Runs kept when their segment was reclaimed, since their handle was open.",
        "dataplane/second_chances",
    ),
    Metric(
        "tombstones",
        "Traces that lost something here, as far as they are remembered, by a fingerprint each.",
        "dataplane/gone",
    ),
    Metric(
        "tombstones_dropped_total",
        "Traces that lost something and were forgotten to remember younger ones.",
        "dataplane/gone_forgotten",
    ),
    Metric("wake_ups_total", "Times that the data plane was woken to work.", "dataplane/wake_ups"),
    Metric("searches_total", "Traces that were looked for in the pool.", "dataplane/searches"),
    Metric(
        "search_passes_total",
        "Passes over the pool, each for all traces that waited.",
        "dataplane/passes",
    ),
    Metric(
        "searched_runs_total",
        "Runs that passes looked at, by their entries in directories.",
        "dataplane/entries_searched",
    ),
    Metric(
        "search_columns_bytes",
        "Memory beside the pool that makes passes faster: parts of directories.",
        "dataplane/column_bytes",
    ),
    Metric(
        "watched_runs_total",
        "Runs that were compared with the traces that are collected already.",
        "dataplane/entries_watched",
    ),
    Metric(
        "false_hits_total",
        "Runs of other traces that passes met. More than a few: a process lies.",
        "dataplane/false_hits",
    ),
    Metric(
        "corrupt_total",
        "Contradictions met in memory that is shared with processes.",
        "dataplane/corrupt",
    ),
    Metric(
        "taken_back_bytes_total",
        "Memory that processes touched and were not granted, given back to the system.",
        "dataplane/taken_back_bytes",
    ),
    # What processes write.
    Metric(
        "percentage",
        "How many of all traces are recorded, in percent: by the coordinator's policy, if it has"
        " one, else by this node's configuration.",
        "percentage",
    ),
    Metric(
        "clients", "Processes that are attached, and live, but for the probes.", "dataplane/clients"
    ),
    Metric(
        "clients_in_pool",
        "Processes that the pool has memory of, those that ended too.",
        "clients_in_pool",
    ),
    Metric(
        "generated_bytes_total",
        "Payload that processes wrote into the pool, by their own word.",
        "dataplane/payload_bytes",
    ),
    Metric(
        "lost_bytes_total",
        "Payload that processes dropped for want of a segment, by their own word.",
        "dataplane/payload_bytes_lost",
    ),
    Metric(
        "lost_records_total",
        "Records that processes dropped; `backsightctl status` names those that dropped the most.",
        "dataplane/records_lost",
    ),
    Metric("lossy_runs_total", "Runs that lack records.", "dataplane/runs_lost"),
    # Triggers, by name.
    Metric(
        "triggers_total",
        "Triggers that fired on this node, by what became of them: admitted; refused by a limit; or"
        " only counted, as a dry run, which would have been admitted.",
        {
            "triggers/{trigger}/admitted": {"outcome": "admitted"},
            "triggers/{trigger}/rate_limited_process": {"outcome": "refused_by_process_limit"},
            "triggers/{trigger}/rate_limited_trigger": {"outcome": "refused_by_trigger_limit"},
            "triggers/{trigger}/dry_run": {"outcome": "dry_run"},
        },
    ),
    Metric(
        "triggers_merged_total",
        "Triggers for a trace that was triggered already: by this name, or 64 times.",
        "triggers/{trigger}/merged",
    ),
    Metric(
        "laterals_cut_total",
        "Neighbours of triggered traces, more than laterals_max, or triggered 64 times already.",
        "triggers/{trigger}/laterals_cut",
    ),
    Metric(
        "groups_collected_total",
        "Triggered traces taken in with their neighbours, fired here or elsewhere.",
        "triggers/{trigger}/collected",
    ),
    Metric(
        "groups_abandoned_total",
        "Triggered traces given up under overload, here or because another node did.",
        {
            "triggers/{trigger}/abandoned": {"by": "this_node"},
            "triggers/{trigger}/dropped_remote": {"by": "another_node"},
        },
    ),
    Metric(
        "slices_incomplete_total",
        "Collected slices that lack something: evicted before the trigger came, lossy when"
        " written, or without room in the report store.",
        {
            "triggers/{trigger}/evicted_before": {"reason": "evicted"},
            "triggers/{trigger}/lossy": {"reason": "lossy"},
            "triggers/{trigger}/store_full": {"reason": "store_full"},
        },
    ),
    Metric(
        "slices_reported_total",
        "Slices that the coordinator has made durable as a whole.",
        "triggers/{trigger}/reported",
    ),
    Metric(
        "reported_bytes_total",
        "Bytes of slices that left the node, repetitions included.",
        "triggers/{trigger}/reported_bytes",
    ),
    Metric(
        "slices_forgotten_total",
        "Triggered traces let go of: nothing came of them, or no more.",
        "triggers/{trigger}/forgotten",
    ),
    Metric(
        "triggers_lost_total",
        "Triggers that found a full queue, or came when the node had skipped their place in it.",
        "dataplane/triggers_lost",
    ),
    Metric("triggers_read_total", "Triggers read from processes' queues.", "dataplane/triggers"),
    Metric(
        "trigger_cells_skipped_total",
        "Places in a trigger queue that their writer never filled.",
        "dataplane/cells_skipped",
    ),
    Metric(
        "pick_up_seconds",
        "From the moment when a process fired a trigger to that when the node acted on it.",
        "pick_up",
        histogram=True,
    ),
    # The report store, and what waits.
    Metric("store_capacity_bytes", "What slices may take, in all.", "dataplane/store_bytes"),
    Metric(
        "store_bytes",
        "What slices take: the bytes that wait to be reported, and 2 KiB of each that is held.",
        "dataplane/store_used_bytes",
    ),
    Metric("slices", "Slices in the report store, or marked to be.", "dataplane/slices"),
    Metric("triggered_traces", "Traces that are triggered here.", "triggered_traces"),
    Metric(
        "report_queue_groups",
        "Triggered traces with bytes that are not durable elsewhere.",
        "queues/{trigger}/groups",
    ),
    Metric(
        "report_queue_bytes",
        "Bytes of slices that are not durable elsewhere.",
        "queues/{trigger}/bytes",
    ),
    Metric(
        "triggers_unreported",
        "Triggered traces of which this node does not know yet that the coordinator has all.",
        "triggers_unreported",
    ),
    Metric(
        "events_waiting",
        "Events of the data plane that the control plane has not seen to.",
        "events_waiting",
    ),
    Metric("polls_total", "Times that the data plane looked for work.", "polls"),
    Metric(
        "loop_lag_seconds",
        "How late a timer of the event loop fires, of which there is one a second: for so long"
        " nothing else was done either.",
        "loop_lag",
        histogram=True,
    ),
    Metric(
        "marks_dropped_total",
        "Triggered traces let go of early, since they were too many.",
        "core/marks_dropped",
    ),
    Metric(
        "firings_dropped_total",
        "Triggers without room among those that wait to be acknowledged.",
        "core/firings_dropped",
    ),
    Metric(
        "abandonments_forgotten_total",
        "Abandoned groups no longer remembered, since they were too many.",
        "core/abandonments_forgotten",
    ),
    # The coordinator, and processes that attach.
    Metric("connected", "1 while the coordinator has taken this node in.", "connected"),
    Metric(
        "protocol_version",
        "The version of the protocol that is spoken with the coordinator; 0 while none is.",
        "protocol",
    ),
    Metric("refusals_total", "Times that the coordinator refused this node.", "core/refused"),
    Metric(
        "certificate_expires_seconds",
        "When the certificate in use is over, or was the one that is refused for that, in seconds"
        " since 1970; 0 without TLS.",
        "certificate_expires_s",
    ),
    Metric(
        "unexpected_messages_total",
        "Messages of the coordinator at a time when it has nothing to say.",
        "core/unexpected_messages",
    ),
    Metric(
        "unknown_messages_total",
        "Messages of the coordinator of a kind that this node does not know, and ignores.",
        "core/unknown_messages",
    ),
    Metric(
        "connects_total",
        "Streams to the coordinator that opened.",
        {
            "uplink/control_connects": {"stream": "control"},
            "uplink/slices_connects": {"stream": "slices"},
        },
    ),
    Metric(
        "connections_lost_total",
        "Streams to the coordinator that were lost, or did not open.",
        {
            "uplink/control_lost": {"stream": "control"},
            "uplink/slices_lost": {"stream": "slices"},
        },
    ),
    Metric("slice_replies_total", "Answers to slices that were sent.", "uplink/slice_replies"),
    Metric(
        "malformed_messages_total",
        "Messages that break the protocol: read, or to be sent.",
        {
            "uplink/malformed": {"direction": "received"},
            "uplink/unsendable": {"direction": "sent"},
        },
    ),
    Metric("attach_connections_total", "Connections to the attach socket.", "attach/connections"),
    Metric(
        "attach_total",
        "Connections to the attach socket, by what became of them: not_allowed, of users that may"
        " not attach; silent, without a request in time; too_many, closed since their user had"
        " more of those than it may; refused, for the reason in the log.",
        {
            "attach/attached": {"outcome": "attached"},
            "attach/resumed": {"outcome": "resumed"},
            "attach/not_allowed": {"outcome": "not_allowed"},
            "attach/malformed": {"outcome": "malformed"},
            "attach/other_version": {"outcome": "other_version"},
            "attach/refused": {"outcome": "refused"},
            "attach/silent": {"outcome": "silent"},
            "attach/too_many": {"outcome": "too_many"},
        },
    ),
    Metric(
        "attach_users_kept_out_total",
        "Times that a user was kept out for a while, since it connected in a loop.",
        "attach/kept_out",
    ),
    Metric(
        "attach_packets_unsent_total",
        "Packets that could not be sent to a process which had not hung up, for the reason in the"
        " log; it was cut off, and attaches again.",
        "attach/unsent",
    ),
    Metric(
        "attach_connections_waiting",
        "Connections to the attach socket that have not said what they want.",
        "attach_waiting",
    ),
    Metric(
        "attach_contexts_moved_total",
        "Times that a process said that it has gone over to another context segment.",
        "attach/moved",
    ),
    Metric(
        "attach_contexts_moving",
        "Processes that are to go over to another context segment, and have not left the one before.",
        "attach_moving",
    ),
    # What the machine's counters tell.
    Metric(
        "machine_looks_total",
        "Times that the machine's counters were read, while processes were attached.",
        "machine/looks",
    ),
    Metric(
        "machine_symptoms_total",
        "Symptoms of the machine itself that were seen: links, queues, listeners, pressure.",
        "machine/seen/{trigger}",
    ),
    Metric(
        "machine_symptoms_without_traces_total",
        "Of these, those that hit no trace that anybody knows of.",
        "machine/without_traces",
    ),
    # What backsight-probes says of itself, while it is connected.
    Metric("probes_connected", "1 while backsight-probes is connected.", "probes_connected"),
    Metric(
        "probes_watched_processes",
        "Attached processes that probes watch.",
        "probes_watched",
    ),
    Metric(
        "probe_events_total",
        "What probes saw of traces, by what became of it: recorded into the trace; lost, since"
        " the ring was full; fired; coalesced, since the trace had fired for the same just before;"
        " limited; or without room in the process's trigger queue.",
        {
            "probes/kinds/{trigger}/recorded": {"outcome": "recorded"},
            "probes/kinds/{trigger}/record_lost": {"outcome": "record_lost"},
            "probes/kinds/{trigger}/fired": {"outcome": "fired"},
            "probes/kinds/{trigger}/coalesced": {"outcome": "coalesced"},
            "probes/kinds/{trigger}/limited": {"outcome": "limited"},
            "probes/kinds/{trigger}/queue_full": {"outcome": "queue_full"},
        },
    ),
    Metric(
        "probe_records_total",
        "Records of probes that were written into the pool, or refused there: nobody records that"
        " trace, or there was no segment.",
        {
            "probes/written/records": {"outcome": "written"},
            "probes/written/breadcrumbs": {"outcome": "written_breadcrumb"},
            "probes/written/refused": {"outcome": "refused"},
        },
    ),
    Metric(
        "probe_runs_total",
        "Runs of a BPF program of ours, without those for threads that are not attached. Programs on drops"
        " and resets count all of them, and on_switch those for whoever ran for 0.2 ms or longer.",
        "probes/programs/{program}/runs",
    ),
    Metric(
        "probe_run_seconds_total",
        "Time in a BPF program of ours, estimated by one in 256 runs.",
        "probes/programs/{program}/run_ns",
        scale=_NS,
    ),
    Metric(
        "probe_recursion_misses_total",
        "Runs of a BPF program of ours that the kernel left out: one was running on that CPU.",
        "probes/programs/{program}/recursion_misses",
    ),
    Metric(
        "probe_verified_instructions",
        "Instructions that the kernel's verifier went through for a program of ours.",
        "probes/programs/{program}/verified_instructions",
    ),
    Metric(
        "probe_map_errors_total",
        "Times that a program of ours had no memory for what it had to note of a thread or socket.",
        "probes/programs/{program}/map_errors",
    ),
    Metric(
        "probe_program_bytes",
        "The kernel's memory that a program of ours takes.",
        "probes/programs/{program}/bytes",
    ),
    Metric(
        "probes_memory_bytes",
        "The kernel's memory that probes take: their maps, and the contexts of the processes that"
        " they watch. What is made ahead for processes to come is not in it.",
        {
            "probes/memory/maps_bytes": {"of": "maps"},
            "probes/memory/contexts_bytes": {"of": "contexts"},
        },
    ),
    Metric(
        "probes_thresholds_raised",
        "1 while all thresholds of probes are ten times what is configured, to keep their budget.",
        "probes/thresholds_raised",
    ),
    Metric(
        "probes_loader",
        "1 for the loader of the probes that are connected: core or bcc.",
        "probes/loader/{loader}",
    ),
    Metric(
        "probes_bypassed",
        "1 while `probes.bypass` keeps all probes out of the kernel.",
        "probes/bypassed",
    ),
    Metric(
        "probe_missing",
        "1 for a probe that is configured and not there: this kernel does not take it, or it cost"
        " too much; the log says why.",
        "probes/missing/{probe}",
    ),
)

SUMS = frozenset(
    {
        "triggers/{trigger}/fired",
        "dataplane/pool_used_bytes",
        "probes/memory/programs_bytes",
    }
)
"""Figures that are sums of others, and so no metrics of their own."""
