# SPDX-License-Identifier: Apache-2.0
"""Memory that has a file descriptor, so that others can map it, or keep it."""

from __future__ import annotations

import errno
import os

# Of linux/memfd.h; Python has no name for it. Linux knows it from 6.3 on; the first releases
# that do refuse memory without it where vm.memfd_noexec is 2.
_MFD_NOEXEC_SEAL = 0x0008


def memfd(name: str) -> int:
    """Memory of no bytes that can be sealed and never be run: its fd, which is its caller's to close.

    OSError if there is none.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel that does not know it.
        return os.memfd_create(name, flags)
