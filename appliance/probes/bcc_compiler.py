# SPDX-License-Identifier: Apache-2.0
"""What bcc does for ``backsight-probes``, in a process of its own: LLVM takes 130 MiB and keeps them.

Reads sources from standard input, and writes for each what came of it: a line of JSON,
``{"bytes": n}`` and then so many bytes, or ``{"error": "..."}``. It needs no privilege: what
is compiled here the probes load.

The bytes are what ``bsp_layout()`` in native/src/probes.h describes.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

# As OWN_SECTION() of bpf/by_bcc.h has them.
_FUNCTION = re.compile(rb"int place_(\w+)\(void \*unused\)")
_HEAD = struct.Struct("32sII")
_INSTRUCTION = struct.Struct("=BBhi")
_INSTRUCTION_BYTES = 8
_INSTRUCTIONS_MAX = 65536

# linux/bpf.h
_GO_TO, _CALL, _EXIT, _LOAD_64 = 0x05, 0x85, 0x95, 0x18
_JUMPS = (0x05, 0x06)  # by comparing 64 bits, or 32

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What stands before each: r0 = 0; exit.
_NOTHING = bytes.fromhex("b700000000000000 9500000000000000")

_FLAGS = (
    # Words of a tracepoint become arguments of any type; those of helpers, pointers.
    "-Wno-int-conversion",
    "-Wno-int-to-void-pointer-cast",
)

# Without these, bcc says that there are no headers.
_NEEDED = ("include/linux/kconfig.h", "include/generated/autoconf.h")

_SOURCES = Path("/usr/src")
_BUILD = Path("/lib/modules") / os.uname().release / "build"


class NoHeadersError(Exception):
    """Says what to install."""


def main() -> int:
    """Serve until standard input ends, in a process below this one, which cleans up whatever ends it.

    128 and the number of a signal if that was one.
    """
    # Who is ended before there is a worker to be ended would leave it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with tempfile.TemporaryDirectory(prefix="backsight-headers-") as directory:
        worker = os.fork()
        if not worker:
            _work(Path(directory))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(worker, signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # Its number stays its own until it is not needed any more.
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _, status = os.waitpid(worker, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _work(directory: Path) -> NoReturn:
    status = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _serve(directory)
        status = 0
    except BaseException:  # noqa: BLE001 (nothing of the process above it is to run here)
        traceback.print_exc()
    os._exit(status)


def _serve(directory: Path) -> None:
    """Compiles in an empty directory: bcc looks for headers in the current one too, which may be anyone's."""
    requests = sys.stdin.buffer
    # bcc writes some of what it minds to standard output.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with replies:
        try:
            headers = find_headers(directory)
            empty = directory / "empty"
            empty.mkdir()
            os.chdir(empty)
            os.environ["BCC_KERNEL_SOURCE"] = str(headers)
            # Where they are gone meanwhile, bcc takes or removes what it finds there, whosever it is.
            os.environ["TMPDIR"] = str(empty)
            # It says so if it is not there.
            import bcc  # noqa: F401
        except (NoHeadersError, ImportError) as error:
            for _ in _requested(requests):
                _reply(replies, {"error": _said(error)})
            return
        for text in _requested(requests):
            try:
                code = compiled(text)
            except Exception as error:  # noqa: BLE001 (bcc raises nothing more special)
                _reply(replies, {"error": str(error)})
            else:
                _reply(replies, {"bytes": len(code)}, code)


def compiled(text: bytes) -> bytes:
    """All functions of a source, each with its head."""
    from bcc import BPF, libbcc

    module = BPF(text=text, cflags=list(_FLAGS))
    code = bytearray()
    for name in dict.fromkeys(_FUNCTION.findall(text)):
        place = b"place_" + name
        if not module.dump_func(place).startswith(_NOTHING):
            raise ValueError(f"bcc has put {name.decode()} elsewhere than it was told to")
        start = libbcc.lib.bpf_function_start(module.module, place) + len(_NOTHING)
        function = up_to_end(start)
        code += _HEAD.pack(name, len(function) // _INSTRUCTION_BYTES, 0) + function
    return bytes(code)


def up_to_end(start: int) -> bytes:
    """Instructions from an address on, up to the last one that the first one leads to.

    bcc tells how long the function before it is, and not this one. After its end nothing is
    jumped to, and there it returns, or goes back.
    """
    reached = at = 0
    while True:
        code, _, offset, _ = _INSTRUCTION.unpack(
            ctypes.string_at(start + at * _INSTRUCTION_BYTES, _INSTRUCTION_BYTES)
        )
        if code & 0x07 in _JUMPS and code not in (_CALL, _EXIT):
            reached = max(reached, at + 1 + offset)
        at += 2 if code == _LOAD_64 else 1
        if code in (_EXIT, _GO_TO) and at > reached:
            return ctypes.string_at(start, at * _INSTRUCTION_BYTES)
        if at > _INSTRUCTIONS_MAX:
            raise ValueError("a function has no end")


def _requested(requests: BinaryIO) -> Iterator[bytes]:
    while line := requests.readline():
        yield requests.read(json.loads(line)["bytes"])


def _reply(replies: BinaryIO, head: dict[str, object], code: bytes = b"") -> None:
    replies.write(json.dumps(head).encode() + b"\n" + code)
    replies.flush()


def _said(error: Exception) -> str:
    if isinstance(error, ImportError):
        return f"bcc for Python is not installed ({error}): install python3-bpfcc"
    return str(error)


# ------------------------------------------------------------------- headers


def find_headers(directory: Path) -> Path:
    """Where bcc is to find headers of Linux: it is not to choose by itself.

    Of whichever version: what we read is laid out by BTF. Distributions split them in two, and
    bcc wants them in one tree. So we make one of links, in a directory that is empty.
    """
    # Empty is as if not set.
    chosen = os.environ.get("BCC_KERNEL_SOURCE")
    if chosen:
        if not _is_whole(Path(chosen)):
            raise NoHeadersError(
                f"BCC_KERNEL_SOURCE is {chosen}, where there is not both of {' and '.join(_NEEDED)}"
            )
        return Path(chosen).absolute()
    if _is_whole(_BUILD):
        return _BUILD
    for number, (common, machine) in enumerate(_split()):
        tree = directory / str(number)
        _link_both(common, machine, tree)
        if _is_whole(tree):
            return tree
    raise NoHeadersError(
        f"there are no headers of Linux in {_BUILD} or {_SOURCES}: install linux-headers of any"
        " version, or set BCC_KERNEL_SOURCE"
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _link_both(one: Path, other: Path, to: Path) -> None:
    """A directory in which is what is in either, by links; what is in both, of the first one."""
    to.mkdir()
    for name in {path.name for directory in (one, other) for path in directory.iterdir()}:
        if (one / name).is_dir() and (other / name).is_dir():
            _link_both(one / name, other / name, to / name)
        else:
            (to / name).symlink_to(one / name if (one / name).exists() else other / name)


def _is_whole(tree: Path) -> bool:
    return all((tree / one).exists() for one in _NEEDED)


def _split() -> Iterator[tuple[Path, Path]]:
    """Both parts of headers as Debian has them, the newest first."""
    commons = _SOURCES.glob("linux-headers-*-common*")
    for common in sorted(commons, key=lambda path: _numbers(path.name), reverse=True):
        version = common.name.split("-common")[0]
        for machine in sorted(_SOURCES.glob(f"{version}-*")):
            if "-common" not in machine.name and (machine / "include/generated").exists():
                yield common, machine


if __name__ == "__main__":
    sys.exit(main())
