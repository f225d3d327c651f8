# SPDX-License-Identifier: Apache-2.0
"""Whoever may not attach says why, however soon the node has said it and hung up."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.packets import AttachRefused, pack_refusal
from testbed.topology import PYTHON

TRIES = 20

PROGRAM = "import backsight; print(backsight.wait_attached(0.2))"


@pytest.fixture
def refusing(tmp_path: Path) -> Iterator[Path]:
    """A socket where nobody is heard."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                except OSError:
                    return
                with accepted:
                    accepted.send(pack_refusal(AttachRefused(errno.EACCES, "not you")))

        thread = threading.Thread(target=refuse)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_reason_is_heard(refusing: Path) -> None:
    environment = {**os.environ, "BACKSIGHT_SOCKET": str(refusing), "BACKSIGHT_DEBUG": "1"}
    for _ in range(TRIES):
        done = subprocess.run(
            [PYTHON, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
        )
        assert (done.stdout, done.stderr) == (
            "False\n",
            f"backsight: {refusing}: refused: not you\n",
        )
