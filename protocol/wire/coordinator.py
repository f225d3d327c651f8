# SPDX-License-Identifier: Apache-2.0
"""What a coordinator says on a Control stream. Each message has one check, which both directions pass through."""

from __future__ import annotations

from collections.abc import Sequence

import backsight_pb2 as pb

from protocol.messages import (
    COLLECT_TRACES_MAX,
    NAME_OF_WHO_BYTES_MAX,
    OPERATION_BYTES_MAX,
    POLICY_RULES_MAX,
    SERVICE_BYTES_MAX,
    ClockProbe,
    Collect,
    CoordinatorMessage,
    Drop,
    Policy,
    PolicyRule,
    Refused,
    Release,
    Snapshot,
    StatusQuestion,
    TraceId,
    TriggerAck,
    Unknown,
    Welcome,
)
from protocol.versions import BEFORE_WINDOWS, Agreed, Feature
from protocol.wire import check


def _checked_welcome(m: Welcome) -> Welcome:
    check.integer("welcome.incarnation", m.incarnation, check.UINT64_MAX)
    check.protocol("welcome.protocol", m.agreed.protocol)
    check.integer("welcome.features", int(m.agreed.features), check.UINT64_MAX)
    check.integer("welcome.priority_seed", m.priority_seed, check.UINT64_MAX)
    return m


def _checked_snapshot(m: Snapshot) -> Snapshot:
    check.integer("snapshot.number", m.number, check.UINT32_MAX)
    check.trigger_name("snapshot.trigger", m.trigger)
    check.integer("snapshot.age_ns", m.age_ns)
    check.text("snapshot.service", m.service, SERVICE_BYTES_MAX)
    check.integer("snapshot.traces", m.traces, check.UINT32_MAX)
    check.text("snapshot.by", m.by, NAME_OF_WHO_BYTES_MAX)
    return m


def _checked_policy(m: Policy) -> Policy:
    check.integer("policy.number", m.number, check.UINT64_MAX)
    if m.percentage_threshold is not None:
        check.integer("policy.percentage_threshold", m.percentage_threshold, check.UINT64_MAX)
    check.count("policy.rules", m.rules, POLICY_RULES_MAX)
    for rule in m.rules:
        check.text("policy.rules.operation", rule.operation, OPERATION_BYTES_MAX, minimum=1)
        check.integer("policy.rules.threshold", rule.threshold, check.UINT64_MAX)
    if m.number == 0 and (m.percentage_threshold is not None or m.rules):
        raise check.WireError(
            "policy.number", "0, which means no policy, and yet something is said"
        )
    return m


def _checked_collect(m: Collect) -> Collect:
    check.count("collect.traces", m.traces, COLLECT_TRACES_MAX, minimum=1)
    for trace in m.traces:
        check.trace("collect.traces", trace)
    return m


def _put_coordinator_message(message: CoordinatorMessage, out: pb.CoordinatorMessage) -> None:
    # Those that there are many of are written where they belong: to copy one costs more.
    match message:
        case Release():
            out.release.trace = check.trace("release.trace", message.trace)
        case Collect():
            _checked_collect(message)
            check.put_group("collect.group", message.group, out.collect.group)
            out.collect.traces.extend(message.traces)
        case TriggerAck():
            check.put_group("trigger_ack.group", message.group, out.trigger_ack.group)
        case Drop():
            check.put_group("drop.group", message.group, out.drop.group)
        case Welcome():
            _checked_welcome(message)
            out.welcome.CopyFrom(
                pb.Welcome(
                    incarnation=message.incarnation,
                    protocol=message.agreed.protocol,
                    features=int(message.agreed.features),
                    priority_seed=message.priority_seed,
                )
            )
        case Refused():
            check.text("refused.reason", message.reason, check.REASON_BYTES_MAX)
            out.refused.CopyFrom(pb.Refused(reason=message.reason.encode()))
        case ClockProbe():
            check.integer("clock_probe.number", message.number, check.UINT32_MAX)
            out.clock_probe.CopyFrom(pb.ClockProbe(number=message.number))
        case Snapshot():
            _checked_snapshot(message)
            out.snapshot.CopyFrom(
                pb.Snapshot(
                    number=message.number,
                    trigger=message.trigger.encode(),
                    age_ns=message.age_ns,
                    service=message.service.encode(),
                    traces=message.traces,
                    by=message.by.encode(),
                )
            )
        case StatusQuestion():
            check.integer("status_question.number", message.number, check.UINT32_MAX)
            out.status_question.CopyFrom(pb.StatusQuestion(number=message.number))
        case Policy():
            _checked_policy(message)
            out.policy.CopyFrom(
                pb.Policy(
                    number=message.number,
                    percentage_threshold=message.percentage_threshold,
                    rules=(
                        pb.PolicyRule(operation=rule.operation.encode(), threshold=rule.threshold)
                        for rule in message.rules
                    ),
                )
            )


def _coordinator_message_in(message: pb.CoordinatorMessage) -> CoordinatorMessage | Unknown:
    match message.WhichOneof("message"):
        case "welcome":
            welcome = message.welcome
            agreed = Agreed(welcome.protocol or BEFORE_WINDOWS, Feature(welcome.features))
            return _checked_welcome(Welcome(welcome.incarnation, agreed, welcome.priority_seed))
        case "refused":
            return Refused(
                check.text(
                    "refused.reason",
                    check.utf8("refused.reason", message.refused.reason),
                    check.REASON_BYTES_MAX,
                )
            )
        case "collect":
            return _checked_collect(
                Collect(
                    check.group_in("collect.group", message.collect.group),
                    tuple(TraceId(trace) for trace in message.collect.traces),
                )
            )
        case "trigger_ack":
            return TriggerAck(check.group_in("trigger_ack.group", message.trigger_ack.group))
        case "drop":
            return Drop(check.group_in("drop.group", message.drop.group))
        case "release":
            return Release(check.trace("release.trace", message.release.trace))
        case "clock_probe":
            return ClockProbe(message.clock_probe.number)
        case "status_question":
            return StatusQuestion(message.status_question.number)
        case "snapshot":
            of = message.snapshot
            return _checked_snapshot(
                Snapshot(
                    of.number,
                    check.utf8("snapshot.trigger", of.trigger),
                    of.age_ns,
                    check.utf8("snapshot.service", of.service),
                    of.traces,
                    check.utf8("snapshot.by", of.by),
                )
            )
        case "policy":
            said = message.policy
            is_said = said.HasField("percentage_threshold")
            return _checked_policy(
                Policy(
                    said.number,
                    said.percentage_threshold if is_said else None,
                    tuple(
                        PolicyRule(
                            check.utf8("policy.rules.operation", rule.operation), rule.threshold
                        )
                        for rule in said.rules
                    ),
                )
            )
        case _:
            return check.unknown(message, "coordinator")


def encode_coordinator_batch(messages: Sequence[CoordinatorMessage]) -> bytes:
    """Encode up to check.BATCH_MESSAGES_MAX messages of a coordinator."""
    check.count("messages", messages, check.BATCH_MESSAGES_MAX)
    batch = pb.CoordinatorBatch()
    for message in messages:
        _put_coordinator_message(message, batch.messages.add())
    return batch.SerializeToString()


def decode_coordinator_batch(data: bytes) -> list[CoordinatorMessage | Unknown]:
    """Decode what a coordinator sent on a Control stream; check.WireError if any of it is malformed."""
    batch = pb.CoordinatorBatch()
    check.parse(batch, "coordinator batch", data)
    check.count("messages", batch.messages, check.BATCH_MESSAGES_MAX)
    return [_coordinator_message_in(message) for message in batch.messages]
