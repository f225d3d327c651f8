#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Processes that attach, in a machine under test: many at once, or one after the other.

crowd.py wave COUNT       start so many, and say how many attached before all have ended
crowd.py stream LOOPS N   so many loops, each of N processes one after the other
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading

# Few traces, and hardly ever a trigger: it is about their coming and going.
STEADY = ["/srv/steady", "10", "100000"]


def start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        STEADY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def has_attached(process: subprocess.Popen[str]) -> bool:
    """It says so, or that there is no node for it, and then ends."""
    assert process.stdout is not None
    return process.stdout.readline() == "attached\n"


def tell_to_end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def await_end(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    process.stdout.read()
    process.wait()


def wave(count: int) -> int:
    processes = [start() for _ in range(count)]
    attached = sum(map(has_attached, processes))
    for process in processes:
        tell_to_end(process)
    for process in processes:
        await_end(process)
    return attached


def stream(loops: int, count: int) -> int:
    attached = [0] * loops

    def loop(number: int) -> None:
        for _ in range(count):
            process = start()
            attached[number] += has_attached(process)
            tell_to_end(process)
            await_end(process)

    threads = [threading.Thread(target=loop, args=(number,)) for number in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(attached)


def main() -> int:
    # Two pipes for each.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    match sys.argv[1:]:
        case ["wave", count]:
            print(wave(int(count)))
        case ["stream", loops, count]:
            print(stream(int(loops), int(count)))
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
