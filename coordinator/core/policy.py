# SPDX-License-Identifier: Apache-2.0
"""What nodes are told to record, and who is told."""

from __future__ import annotations

import json

from coordinator.core.nodes import Node, Nodes
from coordinator.core.outbox import Outbox
from protocol.hashing import fnv1a64
from protocol.messages import NO_POLICY, Policy, PolicyRule
from protocol.versions import Feature


def policy_of(percentage_threshold: int, rules: tuple[PolicyRule, ...] = ()) -> Policy:
    """A table with its number, which tells it from all others, and is the same after a restart."""
    said = [[rule.operation, rule.threshold] for rule in rules]
    content = json.dumps([percentage_threshold, said])
    return Policy(fnv1a64(content.encode()) or 1, percentage_threshold, rules)


class Policies:
    """The one policy that holds, for the nodes that know what that is."""

    def __init__(self, policy: Policy, nodes: Nodes, outbox: Outbox) -> None:
        self.policy = policy
        self._nodes = nodes
        self._outbox = outbox

    def connected(self, node: Node) -> None:
        """Tell a node that was just welcomed. What it had before may be an earlier one."""
        if (
            node.session is not None
            and node.agreed is not None
            and Feature.POLICY in node.agreed.features
        ):
            self._outbox.say(node.session, self._known_by(node.agreed.features))

    def _known_by(self, features: Feature) -> Policy:
        """The policy without what the node does not know, under the number of what is left."""
        threshold = self.policy.percentage_threshold
        if not self.policy.rules or Feature.POLICY_RULES in features:
            return self.policy
        return NO_POLICY if threshold is None else policy_of(threshold)

    def change(self, policy: Policy) -> None:
        """This one holds from now on."""
        if policy == self.policy:
            return
        self.policy = policy
        for node in self._nodes:
            self.connected(node)
