# SPDX-License-Identifier: Apache-2.0
"""Tokens by which a program shows at the coordinator's HTTP port that it may read.

Who has one shows it as a whole; the coordinator's file has what it hashes to, a line each:

    # who       SHA-256 of the token, in hex
    grafana     9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08

A token is 256 random bits, so its hash needs neither salt nor many rounds.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping

TOKENS_BYTES_MAX = 1 << 20
"""Of a file, which has some 10,000 of them then."""

_TOKEN_BYTES = 32
_LINE = re.compile(r"([A-Za-z0-9_.-]{1,63})[ \t]+([0-9a-f]{64})")


class TokenError(ValueError):
    """A file of tokens that cannot be used; the message says which line, and what is allowed."""


def drawn() -> str:
    """A new token."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def hashed(token: str) -> str:
    """What stands for it in the file."""
    return hashlib.sha256(token.encode()).hexdigest()


def line_of(name: str, token: str) -> str:
    """Its line in the file."""
    return f"{name} {hashed(token)}"


def read_tokens(text: str) -> Mapping[str, str]:
    """Who has which token, by what it hashes to."""
    owners: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        said = line.partition("#")[0].strip()
        if not said:
            continue
        match = _LINE.fullmatch(said)
        if match is None:
            raise TokenError(
                f"line {number}: allowed: NAME and 64 hex digits, as `backsightctl token NAME` prints them"
            )
        owners[match[2]] = match[1]
    return owners
