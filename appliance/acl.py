# SPDX-License-Identifier: Apache-2.0
"""Who may connect to a Unix socket, as the kernel sees to it: acl(5) of the socket's file."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path

READ_WRITE = 6
"""What connect() wants of the file."""

# As <linux/posix_acl_xattr.h> lays it out.
_ACL = "system.posix_acl_access"
_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NO_ID = 0xFFFFFFFF


def write_acl(path: Path, users: Mapping[int, int], others: int) -> None:
    """Permit the owner, these users by their permissions, and others and the group theirs.

    OSError: there is no such file, or its filesystem has no ACLs.
    """
    entries = [
        (_USER_OBJ, READ_WRITE, _NO_ID),
        *((_USER, permissions, uid) for uid, permissions in sorted(users.items())),
        (_GROUP_OBJ, others, _NO_ID),
        (_MASK, READ_WRITE, _NO_ID),
        (_OTHER, others, _NO_ID),
    ]
    acl = _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries)
    os.setxattr(path, _ACL, acl, follow_symlinks=False)
