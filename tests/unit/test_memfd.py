# SPDX-License-Identifier: Apache-2.0
"""Memory with a file descriptor: it is never run."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from runtime.memfd import memfd

# Of linux/fcntl.h and linux/memfd.h.
_F_SEAL_EXEC = 0x0020
_MFD_NOEXEC_SEAL = 0x0008


def _seals_that_nobody_runs() -> int:
    """None on a kernel before Linux 6.3, which has no such memory."""
    try:
        os.close(os.memfd_create("probe", _MFD_NOEXEC_SEAL))
    except OSError:
        return 0
    return _F_SEAL_EXEC


def test_it_can_be_sealed_and_not_run() -> None:
    fd = memfd("test")
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _seals_that_nobody_runs() | fcntl.F_SEAL_GROW
    finally:
        os.close(fd)


def test_an_older_kernel_makes_it_without(monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.memfd_create

    def known(name: str, flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", known)
    os.close(memfd("test"))


def test_other_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", full)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        memfd("test")
