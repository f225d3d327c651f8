# SPDX-License-Identifier: Apache-2.0
"""The messages and stubs of stock.proto, compiled when imported."""

from __future__ import annotations

from typing import Any

import grpc

messages: Any
services: Any
messages, services = grpc.protos_and_services("shop/stock.proto")
