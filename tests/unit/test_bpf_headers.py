# SPDX-License-Identifier: Apache-2.0
"""BPF C, which has no libc, can include the part of the ABI that is for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

PROGRAM = """
#include "abi/context.h"

_Static_assert(sizeof(struct bs_context_segment) > BS_TRIGGER_CELLS * sizeof(struct bs_trigger_cell), "");
"""


def test_the_context_compiles_for_bpf_with_nothing_of_libc(repository: Path) -> None:
    done = subprocess.run(
        ["clang", "-target", "bpf", "-nostdinc", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
         "-I", str(repository / "native/src"), "-x", "c", "-"],
        input=PROGRAM, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
