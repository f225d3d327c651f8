# SPDX-License-Identifier: Apache-2.0
"""Text from elsewhere, for a terminal or a log."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text in one line, with '?' for what could drive a terminal or forge a line of a log."""
    return "".join(character if character.isprintable() else "?" for character in text)
