# SPDX-License-Identifier: Apache-2.0
"""Logs for tests."""

from __future__ import annotations

from runtime.log import Log

SILENT = Log(lambda _: None)
"""Nobody reads it."""


def logs_to(messages: list[str]) -> Log:
    """A log whose messages can be looked at."""
    return Log(lambda entry: messages.append(entry.message))
