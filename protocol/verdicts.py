# SPDX-License-Identifier: Apache-2.0
"""What a verdict may be: said to who asks, stored, and named in configurations."""

from __future__ import annotations

import enum


class VerdictKind(enum.StrEnum):
    """From best to worst."""

    COHERENT = "coherent"
    TRUNCATED = "truncated"
    LOSSY = "lossy"
    PARTIAL = "partial"
    PROVISIONAL = "provisional"
