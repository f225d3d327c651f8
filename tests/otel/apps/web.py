# SPDX-License-Identifier: Apache-2.0
"""Two services: ``front`` calls ``back`` over HTTP, and answers by itself where that fails.

Under gunicorn, with ``BACK`` the address of the second. Nothing here knows of tracing.
"""

from __future__ import annotations

import os

import requests
from flask import Flask

front = Flask("front")
back = Flask("back")


@front.get("/cart/<kind>")
def cart(kind: str) -> tuple[str, int]:
    """What the back end says; without it, an empty cart."""
    answer = requests.get(f"http://{os.environ['BACK']}/items/{kind}", timeout=10)
    return (answer.text, 200) if answer.ok else ("empty", 200)


@back.get("/items/<kind>")
def items(kind: str) -> str:
    """Fails where it is asked to."""
    if kind == "broken":
        raise LookupError("the shelf is empty")
    return "2 apples"
