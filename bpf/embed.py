# SPDX-License-Identifier: Apache-2.0
"""Write BPF objects as C: ``embed.py OUTPUT OBJECT...``, each a <name>.bpf.o, and a <name>.bcc.c.

They are in the library that loads them, and not beside it: packagers take a loose object of
another machine for a mistake (lintian: binary-from-other-architecture; rpm's brp-strip fails).
"""

from __future__ import annotations

import sys
from pathlib import Path

_BYTES_A_LINE = 20


def _array(name: str, data: bytes) -> str:
    lines = [
        ",".join(str(byte) for byte in data[at : at + _BYTES_A_LINE])
        for at in range(0, len(data), _BYTES_A_LINE)
    ]
    # libbpf reads the headers of ELF where they are.
    return (
        f"static const unsigned char {name}[] __attribute__((aligned(8))) = {{\n"
        + ",\n".join(lines)
        + "\n};\n"
    )


def main() -> None:
    """Write the C source: embed.py OUTPUT INPUT..."""
    output, *inputs = map(Path, sys.argv[1:])
    objects = [path for path in inputs if path.suffix == ".o"]
    names = [path.name.removesuffix(".bpf.o") for path in objects]
    arrays = [_array(f"{path.name.split('.')[0]}_bytes", path.read_bytes()) for path in objects]
    # Text for bcc ends as C has it end.
    arrays += [
        _array(f"{path.name.removesuffix('.bcc.c')}_source", path.read_bytes() + b"\0")
        for path in inputs
        if path.suffix == ".c"
    ]
    sources = {path.name.removesuffix(".bcc.c") for path in inputs if path.suffix == ".c"}
    entries = [
        f'\t{{"{name}", {name}_bytes, sizeof({name}_bytes), (const char *){name}_source}},'
        if name in sources
        else f'\t{{"{name}", {name}_bytes, sizeof({name}_bytes), 0}},'
        for name in names
    ]
    output.write_text(
        '#include "internal.h"\n\n'
        + "\n".join(arrays)
        + "\nconst struct embedded embedded_objects[] = {\n"
        + "\n".join(entries)
        + f"\n}};\nconst size_t embedded_count = {len(names)};\n"
    )


if __name__ == "__main__":
    main()
