# SPDX-License-Identifier: Apache-2.0
"""Generate the C source of ``backsight_probes_native``, the loader of the probes for Python.

As ``native_build.py``, which says why it is a module of its own. ``appliance.probes.native``
is its typed wrapper, and its only user.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

MODULE = "backsight_probes_native"


def declarations(header: str) -> str:
    """Return what cffi is to know; ValueError when probes.h no longer has the expected form."""
    start, end = header.find("struct bsp;"), header.rfind("#endif")
    if not 0 <= start < end:
        raise ValueError("probes.h has no `struct bsp;` ... `#endif`; appliance/probes_build.py")
    return header[start:end]


def main() -> None:
    """Write the C source: probes_build.py PROBES_H OUTPUT."""
    header, output = map(Path, sys.argv[1:])
    ffi = FFI()
    ffi.cdef(declarations(header.read_text()))
    ffi.set_source(MODULE, '#include "probes.h"')
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
