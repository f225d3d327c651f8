# SPDX-License-Identifier: Apache-2.0
"""What stands in Python of the packets by which processes attach is what stands in the headers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from appliance import packets
from appliance.clients import ClientFds

ABI = Path(__file__).parents[2] / "native/src/abi"
HEADERS = (ABI / "types.h").read_text() + (ABI / "attach.h").read_text()

CODES = {"uint32_t": "I", "int32_t": "i", "uint64_t": "Q", "char": "s"}


def number(name: str) -> int:
    """Of a #define, or of an enumerator with a value."""
    (found,) = re.findall(rf"\b{name}(?: =)? (0x[0-9a-fA-F]+|\d+)", HEADERS)
    return int(found, 0)


def struct_format(name: str) -> str:
    """Of a struct without padding, which each one of the ABI is."""
    (body,) = re.findall(rf"^struct {name} {{$(.*?)^}};", HEADERS, re.MULTILINE | re.DOTALL)
    fields = re.findall(r"^\t(\w+) \w+(?:\[(\d+)\])?;", body, re.MULTILINE)
    assert len(fields) == len(re.findall(r"^\t\w", body, re.MULTILINE))
    return "=" + "".join(count + CODES[kind] for kind, count in fields)


@pytest.mark.parametrize(
    ("in_python", "in_c"),
    [
        (packets.ABI_MAGIC, "BS_ABI_MAGIC"),
        (packets.ABI_VERSION, "BS_ABI_VERSION"),
        (packets.ABI_OLDEST, "BS_ABI_OLDEST"),
        (packets.ABI_FEATURES, "BS_FEATURES"),
        (packets.NEWS_CONTEXT, "BS_NEWS_CONTEXT"),
        (packets.NEWS_POLICY, "BS_NEWS_POLICY"),
    ],
)
def test_numbers_are_those_of_the_headers(in_python: int, in_c: str) -> None:
    assert in_python == number(in_c)


def test_packets_are_laid_out_as_in_the_headers() -> None:
    assert packets._REQUEST.format == struct_format("bs_attach_request")
    assert packets._REPLY.format == struct_format("bs_attach_reply")
    assert packets._NEWS.format == struct_format("bs_attach_news")
    assert struct_format("bs_attach_request").startswith(packets._OPENING.format)


def test_fds_are_sent_in_the_order_of_the_header() -> None:
    (fds,) = re.findall(r"^enum bs_attach_fd {$(.*?)^}", HEADERS, re.MULTILINE | re.DOTALL)
    # AttachServer sends the client's, then that of the policy table.
    names = [*(field.name for field in dataclasses.fields(ClientFds)), "policy"]
    assert re.findall(r"BS_FD_\w+", fds) == [f"BS_FD_{name.upper()}" for name in names]
