# SPDX-License-Identifier: Apache-2.0
"""How far a node's clock is from the coordinator's.

NTP's four timestamps (RFC 5905, section 8): the coordinator sends at t1, the
node receives at t2 and answers at t3, the coordinator receives at t4.

    offset = ((t2 - t1) + (t3 - t4)) / 2      node minus coordinator
    delay  = (t4 - t1) - (t3 - t2)            of both ways together

Whatever part of the delay falls on which way, the true offset is within half
the delay. Queues only ever add delay, so of the last few samples the one with
the least delay is the best (NTP's clock filter), until drift has eaten its
advantage.
"""

from __future__ import annotations

from collections import deque

from protocol.messages import CLOCK_STEP_NS
from protocol.values import dataclass

SAMPLES = 8  # as NTP's clock filter keeps
DRIFT_PPM = 15  # NTP's assumption on how clocks drift apart
PROBES_AT_CONNECT = 4  # one after the other: enough to meet an empty queue once
OFFSET_NS_MAX = 1 << 62  # 146 years: no clock is set further off; what is stored has 63 bits


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Node's clock minus coordinator's, at most ``error_ns`` from the truth."""

    offset_ns: int
    error_ns: int


@dataclass(frozen=True, slots=True)
class _Sample:
    offset_ns: int
    error_ns: int
    taken_ns: int

    def error_at(self, now_ns: int) -> int:
        return self.error_ns + (now_ns - self.taken_ns) * DRIFT_PPM // 1_000_000

    @property
    def rank(self) -> int:
        """The less, the less its error at any time."""
        return self.error_ns * 1_000_000 - self.taken_ns * DRIFT_PPM


class ClockFilter:
    """The probes of one node, and what they add up to."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._best: _Sample | None = None
        self._number = 0
        self._sent_ns: int | None = None

    def probe(self, now_ns: int) -> int:
        """The number of a probe that leaves now; an unanswered one is given up."""
        self._number = (self._number + 1) & 0xFFFFFFFF
        self._sent_ns = now_ns
        return self._number

    def answer(
        self, number: int, received_ns: int, sent_ns: int, now_ns: int, realtime_ns: int
    ) -> bool:
        """Take the answer to the last probe; False for any other, or nonsense.

        The coordinator's real time when the probe left is reckoned back from
        now by the monotonic clock, so that a step of its own clock in between
        does no harm.
        """
        if number != self._number or self._sent_ns is None:
            return False
        round_trip_ns = now_ns - self._sent_ns
        self._sent_ns = None
        delay_ns = round_trip_ns - (sent_ns - received_ns)
        if not 0 <= delay_ns <= round_trip_ns:
            return False  # stepped between t2 and t3, or lies
        left_ns = realtime_ns - round_trip_ns
        offset_ns = ((received_ns - left_ns) + (sent_ns - realtime_ns)) // 2
        if abs(offset_ns) > OFFSET_NS_MAX:
            return False
        sample = _Sample(offset_ns, delay_ns // 2 + 1, now_ns)
        # Samples that cannot both be true: one of the clocks was stepped.
        if any(
            abs(old.offset_ns - offset_ns) > old.error_at(now_ns) + sample.error_ns
            for old in self._samples
        ):
            self._samples.clear()
        self._samples.append(sample)
        self._find_best()
        return True

    def stepped(self, by_ns: int) -> bool:
        """The node set its clock, and says so within CLOCK_STEP_NS of the truth.

        False if no clock can be set that far; then nothing is known of it.
        """
        self._sent_ns = None  # a probe that is under way may have met either
        self._samples = deque(
            (
                _Sample(old.offset_ns + by_ns, old.error_ns + CLOCK_STEP_NS, old.taken_ns)
                for old in self._samples
            ),
            maxlen=SAMPLES,
        )
        makes_sense = all(abs(sample.offset_ns) <= OFFSET_NS_MAX for sample in self._samples)
        if not makes_sense:
            self._samples.clear()
        self._find_best()
        return makes_sense

    def _find_best(self) -> None:
        # Here, and not for each status of a node.
        self._best = min(self._samples, key=lambda sample: sample.rank, default=None)

    def estimate(self, now_ns: int) -> ClockOffset | None:
        """The best that is known now, None before the first answer."""
        best = self._best
        return None if best is None else ClockOffset(best.offset_ns, best.error_at(now_ns))
