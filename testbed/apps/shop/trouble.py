# SPDX-License-Identifier: Apache-2.0
"""Which orders go wrong, and how, by the order's number.

Of the usual troubles one order in two hundred has each, but none of the first four hundred: who
looks for what is unusual has to see first what is usual. The others happen to orders that
are asked for on purpose, with a number from UNUSUAL_ORDERS on.
"""

from __future__ import annotations

import enum

_ORDERS_OF_EACH = 200
_HEALTHY_ORDERS = 400

UNUSUAL_ORDERS = 10_000_000
_UNUSUAL_KINDS = 10


class Trouble(enum.Enum):
    """The number is the remainder of the orders that it strikes."""

    STOCK_RAISES = 125
    ROW_IS_LOCKED = 150
    FRONT_RAISES = 175
    STOCK_IS_CLOSED = 199


class Unusual(enum.Enum):
    """The number is the last digit of the orders that it strikes."""

    HOLDS_BOOK = 0
    """It keeps the book of invoices for itself for a while."""
    WANTS_BOOK = 1
    """It writes into the book."""
    WANTS_RECEIPT = 2
    """Its receipt must be on the disk."""
    CRASHES = 3
    """The stock's process dies of it."""


def of(order: int) -> Trouble | None:
    """The trouble that an order meets."""
    if order < _HEALTHY_ORDERS or order >= UNUSUAL_ORDERS:
        return None
    remainder = order % _ORDERS_OF_EACH
    return next((trouble for trouble in Trouble if trouble.value == remainder), None)


def unusual(order: int) -> Unusual | None:
    """The one that an order of these meets."""
    if order < UNUSUAL_ORDERS:
        return None
    digit = order % _UNUSUAL_KINDS
    return next((kind for kind in Unusual if kind.value == digit), None)
