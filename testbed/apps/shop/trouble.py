# SPDX-License-Identifier: Apache-2.0
"""Which orders go wrong, and how: one in two hundred of each kind, by the order's number.

None of the first four hundred: who looks for what is unusual has to see first what is usual.
"""

from __future__ import annotations

import enum

_ORDERS_OF_EACH = 200
_HEALTHY_ORDERS = 400


class Trouble(enum.Enum):
    """The number is the remainder of the orders that it strikes."""

    STOCK_RAISES = 125
    ROW_IS_LOCKED = 150
    FRONT_RAISES = 175
    STOCK_IS_CLOSED = 199


def of(order: int) -> Trouble | None:
    """The trouble that an order meets."""
    if order < _HEALTHY_ORDERS:
        return None
    remainder = order % _ORDERS_OF_EACH
    return next((trouble for trouble in Trouble if trouble.value == remainder), None)
