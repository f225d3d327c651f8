# SPDX-License-Identifier: Apache-2.0
"""Addresses from which no connection is taken.

The kernel drops what comes from there to a socket that listens, by a filter on that socket
(socket(7), SO_ATTACH_FILTER; classic BPF, linux/filter.h), which needs no rights. Connections that
there are go on. One that is taken meanwhile inherits the filter, and keeps it; but it comes from
another address.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from array import array
from collections.abc import Collection, Iterable

# asm-generic/socket.h; Python has no names for them.
_SO_ATTACH_FILTER = 26

# struct sock_filter: code, how many to skip if it holds and if not, operand.
_INSTRUCTION = struct.Struct("=HBBI")
# struct sock_fprog: how many, and where.
_PROGRAM = struct.Struct("@HP")

_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _SKIP, _IF_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x05, 0x15, 0x06

# SKF_NET_OFF: from the head of the IP packet.
_PACKET = 0xFFF00000
_SOURCE_OF_IPV4 = _PACKET + 12
_SOURCE_OF_IPV6 = _PACKET + 8

_DROP, _TAKE = 0, 0xFFFFFFFF

ADDRESSES_MAX = 64
"""At once: the kernel charges the filter to each connection that inherits it, up to optmem_max (20 kB)."""


def _line(code: int, operand: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return _INSTRUCTION.pack(code, if_so, if_not, operand)


def _program(addresses: Iterable[str]) -> list[bytes]:
    of_ipv4, of_ipv6 = [_line(_LOAD_WORD, _SOURCE_OF_IPV4)], list[bytes]()
    for address in addresses:
        ip = ipaddress.ip_address(address)
        if ip.version == 4:
            of_ipv4 += [_line(_IF_EQUAL, int(ip), if_not=1), _line(_RETURN, _DROP)]
            continue
        # Whoever has one address of a network of 64 bits has all of them.
        network = int(ip) >> 64
        of_ipv6 += [
            _line(_LOAD_WORD, _SOURCE_OF_IPV6),
            _line(_IF_EQUAL, network >> 32, if_not=3),
            _line(_LOAD_WORD, _SOURCE_OF_IPV6 + 4),
            _line(_IF_EQUAL, network & 0xFFFFFFFF, if_not=1),
            _line(_RETURN, _DROP),
        ]
    take = _line(_RETURN, _TAKE)
    of_ipv4.append(take)
    return [
        _line(_LOAD_BYTE, _PACKET),
        _line(_SHIFT_RIGHT, 4),
        _line(_IF_EQUAL, 6, if_not=1),
        _line(_SKIP, len(of_ipv4)),
        *of_ipv4,
        *of_ipv6,
        take,
    ]


def keep_out(listening: Iterable[socket.socket], addresses: Collection[str]) -> None:
    """Take connections from all addresses but these; of IPv6 from none of the same 64 bits.

    OSError says why the kernel does not.
    """
    if len(addresses) > ADDRESSES_MAX:
        raise ValueError(f"{len(addresses)} addresses; at most {ADDRESSES_MAX} can be kept out")
    lines = _program(addresses)
    code = array("B", b"".join(lines))  # which tells its address
    program = _PROGRAM.pack(len(lines), code.buffer_info()[0])
    for one in listening:
        one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
