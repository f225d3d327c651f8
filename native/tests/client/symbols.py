# SPDX-License-Identifier: Apache-2.0
"""Whether a library exports what its header declares, and nothing else: symbols.py LIBRARY HEADER.

Each symbol must have a version, which is the library's name and a release.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_DECLARATION = re.compile(
    r"^(?:extern )?BS_EXPORT\b[^;]*?\b(bs_\w+)(?:\(|;|\n\s*__attribute__)", re.M
)
_VERSIONED = re.compile(r"(bs_\w+)@@(BACKSIGHT_\d+\.\d+)")
_VERSION_ITSELF = re.compile(r"BACKSIGHT_\d+\.\d+")


def _exported(library: str) -> set[str]:
    """The names, without versions. Dies of one that has none."""
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--with-symbol-versions", library],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = set()
    for line in listing.splitlines():
        symbol = line.split()[-1]
        if _VERSION_ITSELF.match(symbol):
            continue
        versioned = _VERSIONED.fullmatch(symbol)
        if not versioned:
            sys.exit(f"{symbol} is exported, and is not of backsight.map")
        names.add(versioned.group(1))
    return names


def main() -> None:
    """Compare them."""
    library, header = sys.argv[1:]
    declared = set(_DECLARATION.findall(Path(header).read_text()))
    exported = _exported(library)
    if not declared:
        sys.exit(f"{header} declares nothing with BS_EXPORT")
    for name in sorted(declared - exported):
        print(f"{name} is declared in {header}, but is not in backsight.map")
    for name in sorted(exported - declared):
        print(f"{name} is exported, but {header} does not declare it with BS_EXPORT")
    if declared != exported:
        sys.exit(1)
    print(f"{len(declared)} symbols")


if __name__ == "__main__":
    main()
