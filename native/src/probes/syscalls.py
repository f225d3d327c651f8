# SPDX-License-Identifier: Apache-2.0
"""Write the table of system calls: ``syscalls.py OUTPUT COMPILER...``.

Their names and numbers are those of the headers of the machine that is built for. What it
means that a thread is blocked in one stands here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# In these a thread waits for work: that it waits long says nothing.
_WAIT_FOR_WORK = frozenset(
    [
        "accept",
        "accept4",
        "clock_nanosleep",
        "epoll_pwait",
        "epoll_pwait2",
        "epoll_wait",
        "io_getevents",
        "io_pgetevents",
        "io_uring_enter",
        "mq_timedreceive",
        "msgrcv",
        "nanosleep",
        "pause",
        "poll",
        "ppoll",
        "pselect6",
        "restart_syscall",
        "rt_sigsuspend",
        "rt_sigtimedwait",
        "sched_yield",
        "select",
        "semtimedop",
        "wait4",
        "waitid",
    ]
)
_FUTEX = frozenset(["futex", "futex_wait", "futex_waitv", "futex_wake"])
_EXITS = frozenset(["exit", "exit_group"])

# As PROBES_SYSCALLS and struct probes_syscall have room for (bpf/interface.h).
_NUMBERS_MAX = 512
_NAME_BYTES_MAX = 22

_DEFINE = re.compile(r"#define __NR_(\w+) (\d+)")


def _class(name: str) -> str:
    if name in _WAIT_FOR_WORK:
        return "SYSCALL_IGNORED"
    if name in _FUTEX:
        return "SYSCALL_FUTEX"
    if name in _EXITS:
        return "SYSCALL_EXITS"
    return "SYSCALL_BLOCKS"


def main() -> None:
    """Write the C source: syscalls.py OUTPUT COMPILER..."""
    output, *compiler = sys.argv[1:]
    defines = subprocess.run(
        [*compiler, "-E", "-dM", "-x", "c", "-"],
        input="#include <sys/syscall.h>\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = {int(number): name for name, number in _DEFINE.findall(defines)}
    lines = [
        f'\t[{number}] = {{ {_class(name)}, "{name[:_NAME_BYTES_MAX]}" }},'
        for number, name in sorted(names.items())
        if number < _NUMBERS_MAX
    ]
    Path(output).write_text(
        '#include "internal.h"\n\n'
        "const struct probes_syscall syscall_table[PROBES_SYSCALLS] = {\n"
        + "\n".join(lines)
        + "\n};\n"
    )


if __name__ == "__main__":
    main()
