# SPDX-License-Identifier: Apache-2.0
"""What the coordinator's core is told by its configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields

from protocol.messages import CHUNK_BYTES_MAX

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """Settings of the coordinator's core. All must be positive, but for those that may be 0.

    When
      answer_timeout_ns   a node that was asked and does not answer in this
                          time is missing; so is one that is not connected
      quiet_ns            nothing open and no news for this long: the verdict
                          is final. Longer for traces that are large to judge
      provisional_ns      something still open after this long: the verdict is
                          provisional, and again whenever so much time passed
                          with news
      linger_ns           from the last news of a trace that misses nothing to
                          its Release: what is written late, after the
                          response, still belongs to it
      missing_linger_ns   the same for one that misses something: a partition
                          that heals sooner is made good. No longer than event
                          horizons are, since nodes keep nothing older
      clock_probe_interval_ns  between two probes of a node's clock. Crystals
                          drift by tens of microseconds in a minute, which is
                          less than what a probe can tell
      patience_ns         what nobody waits for (acknowledgements, releases, credit that is not
                          needed yet) waits so long for other messages to its node, and for no
                          more than a quarter of linger_ns; 0: it does not
      node_expiry_ns      a node that is gone for so long is forgotten, unless a trace in
                          memory names it

    How much
      memory_bytes        slice bytes received, or allowed by credit to come,
                          and not durable
      credit_window_bytes of one node that may be under way
      traces_max          traces in memory. What gives way for one more, and for more
                          of the next ones: see memory.py
      evidence_max        spans, hops, crumbs, runs, nodes and reasons in memory,
                          150 bytes or so each, until the verdict can change no
                          more
      evidence_per_trace_max  the same, of one trace that is judged. A larger one
                          is stored, and called truncated
      assembly_bytes_max  what is stored of the traces in memory, which the store
                          must not delete yet
      slice_bytes_max     of one slice that are stored. What is beyond is taken from
                          its node and dropped, and the slice called truncated
      closed_max          traces remembered only by their outcome, to answer
                          nodes that come back late; fewer where outcomes have
                          more slices and reasons in all than evidence_max
      nodes_max           node names known, also of nodes that are gone
      nodes_per_trace_max nodes that are asked for one trace
      groups_per_trace_max triggers under which one trace is traversed
      trigger_names_max   trigger names with counters of their own; the rest share one
      fired_per_s         traces that the firings of one node may begin, on the long run
      fired_burst         as many at once: what a node repeats that was away

    By ``priority_seed`` traces are ranked. Nodes are told it, so that all give up the same; 0: each
    node goes by the seed of its cluster.
    """

    answer_timeout_ns: int = 1 * NS_PER_S
    quiet_ns: int = NS_PER_S // 5
    provisional_ns: int = 10 * NS_PER_S
    linger_ns: int = 30 * NS_PER_S
    missing_linger_ns: int = 300 * NS_PER_S
    patience_ns: int = 5 * NS_PER_S
    node_expiry_ns: int = 7 * 86400 * NS_PER_S
    clock_probe_interval_ns: int = 60 * NS_PER_S

    memory_bytes: int = 256 << 20
    credit_window_bytes: int = 4 << 20
    traces_max: int = 16384
    evidence_max: int = 1 << 21
    evidence_per_trace_max: int = 1 << 18
    assembly_bytes_max: int = 4 << 30
    slice_bytes_max: int = 256 << 20
    closed_max: int = 8192
    nodes_max: int = 16384
    nodes_per_trace_max: int = 1024
    groups_per_trace_max: int = 64
    trigger_names_max: int = 256
    fired_per_s: int = 1000
    fired_burst: int = 16384
    priority_seed: int = 0

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value < 1 and setting.name not in ("priority_seed", "patience_ns"):
                raise ValueError(f"{setting.name} is {value}; it must be positive")
        if self.memory_bytes < CHUNK_BYTES_MAX:
            raise ValueError(
                f"memory_bytes is {self.memory_bytes}; at least one chunk, {CHUNK_BYTES_MAX} "
                "bytes, must fit"
            )
