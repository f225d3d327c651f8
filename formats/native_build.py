# SPDX-License-Identifier: Apache-2.0
"""Generate the C source of ``backsight_decode_native``, the decoder of slices for Python.

Meson runs this (formats/meson.build) and compiles the result with the stable ABI
into build/formats, which is on the tree's PYTHONPATH. The declarations are read
from native/src/decode.h, the one place where they stand; cffi's API mode lets the
compiler check them again, and releases the GIL in every call.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

MODULE = "backsight_decode_native"


def declarations(header: str) -> str:
    """Return what cffi is to know of decode.h; ValueError if that has another form."""
    start = header.find("struct bsd_slice;")
    end = header.rfind("#endif")
    if not 0 <= start < end:
        raise ValueError(
            "decode.h has no `struct bsd_slice;` ... `#endif`; formats/native_build.py"
        )
    return header[start:end]


def main() -> None:
    """Write the C source: native_build.py DECODE_H OUTPUT."""
    header, output = map(Path, sys.argv[1:])
    ffi = FFI()
    ffi.cdef(declarations(header.read_text()))
    ffi.set_source(MODULE, '#include "decode.h"\n')
    ffi.emit_c_code(str(output))


if __name__ == "__main__":
    main()
