# SPDX-License-Identifier: Apache-2.0
"""native/src/probes/processes.c: which processes are watched."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess

import pytest

from appliance.probes.compiler import load
from appliance.probes.native import Loader, Newcomer

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.timeout(60)]

# More than are put in by one call.
MANY = 150


def test_each_of_many_gets_a_number_or_a_reason(either_loader: str) -> None:
    with contextlib.ExitStack() as stack:
        probes = stack.enter_context(contextlib.closing(load(Loader[either_loader.upper()])))

        def newcomer(client: int, pid: int) -> Newcomer:
            fds = os.pidfd_open(pid), probes.make_context()
            for fd in fds:
                stack.callback(os.close, fd)
            return Newcomer(client, *fds)

        with subprocess.Popen(["true"]) as ended:
            newcomers = [newcomer(client, os.getpid()) for client in range(MANY)]
            newcomers[70] = newcomer(70, ended.pid)
        found = probes.register(newcomers)
        assert isinstance(found[70], OSError)
        assert found[70].errno == errno.ESRCH
        numbers = [one for one in found if isinstance(one, int)]
        assert len(set(numbers)) == len(numbers) == MANY - 1
        assert probes.memory().contexts_bytes == (MANY - 1) * probes.context_bytes
        probes.unregister(numbers)
        assert probes.memory().contexts_bytes == 0
        with pytest.raises(OSError, match="No such file or directory"):
            probes.unregister(numbers[:1])
        # Its number is free again, as are the others.
        assert set(map(str, probes.register(newcomers[:2]))) == {"0", "1"}


def test_there_is_a_last_place(either_loader: str) -> None:
    """As many as can be attached to a node."""
    with contextlib.ExitStack() as stack:
        probes = stack.enter_context(contextlib.closing(load(Loader[either_loader.upper()])))
        pidfd, context = os.pidfd_open(os.getpid()), probes.make_context()
        stack.callback(os.close, pidfd)
        stack.callback(os.close, context)
        *found, last = probes.register([Newcomer(1, pidfd, context)] * 1025)
        assert [one for one in found if not isinstance(one, int)] == []
        assert isinstance(last, OSError)
        assert last.errno == errno.ENOSPC
        assert "as many processes are watched as there is room for" in str(last)
