# SPDX-License-Identifier: Apache-2.0
"""Write BPF objects as C: ``embed.py OUTPUT OBJECT...``, each a <name>.bpf.o.

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
        f"static const unsigned char {name}_bytes[] __attribute__((aligned(8))) = {{\n"
        + ",\n".join(lines)
        + "\n};\n"
    )


def main() -> None:
    """Write the C source: embed.py OUTPUT OBJECT..."""
    output, *objects = map(Path, sys.argv[1:])
    names = [path.name.removesuffix(".bpf.o") for path in objects]
    arrays = [_array(name, path.read_bytes()) for name, path in zip(names, objects, strict=True)]
    entries = [f'\t{{"{name}", {name}_bytes, sizeof({name}_bytes)}},' for name in names]
    output.write_text(
        '#include "internal.h"\n\n'
        + "\n".join(arrays)
        + "\nconst struct embedded embedded_objects[] = {\n"
        + "\n".join(entries)
        + f"\n}};\nconst size_t embedded_count = {len(names)};\n"
    )


if __name__ == "__main__":
    main()
