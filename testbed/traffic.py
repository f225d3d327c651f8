# SPDX-License-Identifier: Apache-2.0
"""Counts the TCP payload that a host exchanges with a port of another, exactly.

nftables counts IP packets, so the payload is what is left after the headers:
20 bytes of IPv4 and four times the data offset of TCP, which one rule for each
data offset tells. Control, slices, handshakes of HTTP/2: everything that is
sent to the port counts, retransmissions too.
"""

from __future__ import annotations

import json

from testbed.topology import Host

TABLE = "backsight_traffic"

_IPV4_HEADER_BYTES = 20
_TCP_WORD_BYTES = 4
_DATA_OFFSETS = range(5, 16)  # RFC 9293: words of the TCP header


def _chain(hook: str, port: str) -> str:
    rules = "\n".join(f"    tcp {port} tcp doff {words} counter" for words in _DATA_OFFSETS)
    return f"""  chain {hook}_counted {{
    type filter hook {hook} priority 0
{rules}
  }}
"""


def count_sent_to(host: Host, port: int, *, answers: bool = False) -> None:
    """Start counting on a host; from zero if it already did. ``answers``: what that port sends, too."""
    chains = _chain("output", f"dport {port}")
    if answers:
        chains += _chain("input", f"sport {port}")
    script = f"""table inet {TABLE}
delete table inet {TABLE}
table inet {TABLE} {{
{chains}}}
"""
    host.run("nft", "-f", "-", said=script)


def payload_bytes_sent(host: Host) -> int:
    """TCP payload since counting started, in bytes."""
    listing = host.run("nft", "-j", "list", "table", "inet", TABLE)
    total = 0
    for item in json.loads(listing)["nftables"]:
        if "rule" not in item:
            continue
        words = counter = None
        for part in item["rule"]["expr"]:
            if "counter" in part:
                counter = part["counter"]
            elif part["match"]["left"]["payload"]["field"] == "doff":
                words = part["match"]["right"]
        if words is None or counter is None:
            raise RuntimeError(f"nftables lists a rule that is not ours: {item['rule']}")
        total += counter["bytes"] - counter["packets"] * (
            _IPV4_HEADER_BYTES + _TCP_WORD_BYTES * words
        )
    return total
