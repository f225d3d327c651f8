# SPDX-License-Identifier: Apache-2.0
"""Generate the C source of ``backsight_node_native``, the data plane for Python.

Meson runs this (appliance/meson.build) and compiles the result with the
stable ABI into build/appliance, which is on the tree's PYTHONPATH. It is a
module of its own, not ``appliance._native``, because a package cannot lie in
the source folder and in the build folder at once. ``appliance.native`` is
its typed wrapper, and its only user.

The declarations are read from the headers themselves, so that there is one
place where they stand. cffi's API mode lets the compiler check them again, and
releases the GIL in every call.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

MODULE = "backsight_node_native"

# Of backsight.h, only what node.h uses.
_CLIENT_CONSTANTS = (
    "BS_NODE_NAME_MAX",
    "BS_TRIGGER_NAME_MAX",
    "BS_TRIGGER_WHY_MAX",
    "BS_LATERALS_MAX",
)
_CLIENT_STRUCT = "bs_trace_id"

# Threads of Python wait for each other up to 5 ms (sys.getswitchinterval), which is all
# that a trigger has from the queue to its pick-up; so none is waited for in between.
_WAIT_AND_POLL = """
#include "node.h"

/* A pair first, if the last one is older than that: by it the poll knows when the triggers
were fired that it finds. *slices: how many there are then. */
static int wait_and_poll(struct bsn *node, int64_t timeout_ns, bool counter,
		uint64_t pair_interval_ns, uint64_t *paired_ns, uint64_t *slices)
{
	uint64_t ticks, monotonic_ns, realtime_ns;
	struct bsn_usage usage;
	int events;

	bsn_wait(node, timeout_ns);
	bsn_clock_read(counter, &ticks, &monotonic_ns, &realtime_ns);
	if (monotonic_ns - *paired_ns >= pair_interval_ns) {
		/* -EINVAL: another thread stored a later one. */
		bsn_clock_pair(node, ticks, monotonic_ns, realtime_ns);
		*paired_ns = monotonic_ns;
	}
	events = bsn_poll(node, monotonic_ns);
	bsn_get_usage(node, &usage);
	*slices = usage.slices;
	return events;
}
"""


def _constant(header: str, name: str) -> str:
    found = re.search(rf"^#define {name}\s+(\d+)", header, re.MULTILINE)
    if not found:
        raise ValueError(f"backsight.h has no decimal #define {name}; appliance/native_build.py")
    return f"#define {name} {found[1]}"


def _struct(header: str, name: str) -> str:
    found = re.search(rf"^struct {name} {{.*?^}};", header, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"backsight.h has no struct {name}; appliance/native_build.py")
    return found[0]


def declarations(client_header: str, node_header: str) -> str:
    """Return what cffi is to know: node.h, and what it needs of backsight.h.

    Raises ValueError when a header no longer has the expected form.
    """
    start = node_header.find("struct bsn;")
    end = node_header.rfind("#endif")
    if not 0 <= start < end:
        raise ValueError("node.h has no `struct bsn;` ... `#endif`; appliance/native_build.py")
    parts = [_constant(client_header, name) for name in _CLIENT_CONSTANTS]
    parts.append(_struct(client_header, _CLIENT_STRUCT))
    parts.append(node_header[start:end].replace("BSN_EXPORT ", ""))
    return "\n".join(parts)


def builder(client_header: Path, node_header: Path) -> FFI:
    """Return the cffi builder of the extension module."""
    ffi = FFI()
    ffi.cdef(declarations(client_header.read_text(), node_header.read_text()))
    ffi.cdef(
        "static int wait_and_poll(struct bsn *node, int64_t timeout_ns, bool counter,"
        " uint64_t pair_interval_ns, uint64_t *paired_ns, uint64_t *slices);"
    )
    ffi.set_source(MODULE, _WAIT_AND_POLL)
    return ffi


def main() -> None:
    """Write the C source: native_build.py BACKSIGHT_H NODE_H OUTPUT."""
    client_header, node_header, output = map(Path, sys.argv[1:])
    builder(client_header, node_header).emit_c_code(str(output))


if __name__ == "__main__":
    main()
