# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere, for a terminal or a log."""

from __future__ import annotations

import re


def printable(text: str) -> str:
    """The text in one line, with '?' for what could drive a terminal or forge a line of a log."""
    return "".join(character if character.isprintable() else "?" for character in text)


def without_secrets(url: str) -> str:
    """A URL without user, password and query; where it is malformed, rather less than too much."""
    scheme, slashes, rest = url.partition("//")
    if not slashes:
        scheme, rest = "", url
    shown = re.split(r"[?#]", rest)[0]
    cut = "?…" if shown != rest else ""
    user, at, place = shown.rpartition("@")
    if at and "/" not in user:
        return f"{scheme}{slashes}…@{place}{cut}"
    # A password with / or ? in it, which should be written as %2F or %3F, ends the host.
    return f"{scheme}{slashes}…" if "@" in rest else f"{scheme}{slashes}{shown}{cut}"
