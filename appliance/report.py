# SPDX-License-Identifier: Apache-2.0
"""How a node is, for an operator who asks from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from protocol.messages import REPORT_BYTES_MAX

# What has an entry for each trigger or program, so that it may be much. Metrics have it all.
_LONG = ("triggers", "probes", "queues", "lossy", "quotas")


def report_text(status: Mapping[str, Any], bytes_max: int = REPORT_BYTES_MAX) -> str:
    """JSON of it; without its longest sections where there is more than a message holds."""
    left = dict(status)
    text = json.dumps(left)
    for name in _LONG:
        if len(text) <= bytes_max:
            break
        if left.pop(name, None):
            left["left_out"] = [*left.get("left_out", ()), name]
        text = json.dumps(left)
    return text
