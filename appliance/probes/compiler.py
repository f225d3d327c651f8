# SPDX-License-Identifier: Apache-2.0
"""Programs by either loader: objects as they are in the library, or what bcc makes of their sources.

By ``core``, libbpf puts the kernel's offsets into objects that were compiled ahead. By ``bcc``,
a process (bcc_compiler.py) compiles them here, and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator

from appliance.probes.native import BASE, Loader, NativeProbes, layout, source
from runtime.children import module_command, module_environment

Code = Callable[[str], bytes]
"""The code of bpf/<name>.bpf.c for ``NativeProbes.attach``; OSError: why there is none."""

# Of what a compiler says, where its first error is.
_SAID_BYTES = 65536

# The largest object has some 100 KiB of code.
_CODE_BYTES_MAX = 1 << 24

# The first source, for which LLVM is loaded too, takes a second here.
_ANSWERS_WITHIN_S = 30.0

_HANGS = f"the compiler did not answer within {_ANSWERS_WITHIN_S:g} s"


def choices(key: str) -> tuple[Loader, ...]:
    """The loaders to be tried, as ``probes.loader`` has it."""
    return {"core": (Loader.CORE,), "bcc": (Loader.BCC,)}.get(key, (Loader.CORE, Loader.BCC))


def load(loader: Loader) -> NativeProbes:
    """The maps of all probes, by one loader; OSError: why not."""
    with coder(loader) as code:
        return NativeProbes(loader, code(BASE))


def load_any(key: str, warn: Callable[[str], None]) -> tuple[Loader, NativeProbes]:
    """The first of the loaders that are configured that works; OSError says why none does."""
    refused: list[str] = []
    for loader in choices(key):
        try:
            probes = load(loader)
        except OSError as error:
            refused.append(f"{loader.key}: {error}")
        else:
            if refused:
                warn(f"the loader {refused[0]}; the loader {loader.key} is taken instead")
            return loader, probes
    raise OSError(
        f"no loader of probes works here; {'; '.join(refused)}; `backsightctl doctor` tells more"
    )


@contextlib.contextmanager
def coder(loader: Loader) -> Iterator[Code]:
    """What gives code to attach; its compiler, if it takes one, ends with the block."""
    if loader is Loader.CORE:
        yield lambda _: b""
        return
    # The kernel's types are megabytes: they are looked at once.
    layout_once = functools.cache(layout)
    with compiler() as compiled:
        yield lambda name: compiled(name, layout_once() + source(name))


@contextlib.contextmanager
def compiler() -> Iterator[Callable[[str, bytes], bytes]]:
    """bcc, for a layout and what is to be compiled after it; OSError: what it minds of the one of that name."""
    with contextlib.closing(_Compiler()) as made:
        yield made.compiled


class _Compiler:
    """A process that compiles, one source after the other; another one after it has died of one."""

    def __init__(self) -> None:
        # In memory: the libraries of temporary files take some.
        self._said = os.memfd_create("compiler")
        fcntl.fcntl(self._said, fcntl.F_SETFL, os.O_APPEND)
        self._process: subprocess.Popen[bytes] | None = None
        self._hangs = False

    def close(self) -> None:
        self._end()
        os.close(self._said)

    def compiled(self, name: str, text: bytes) -> bytes:
        if self._hangs:
            raise OSError(f"{name}: {_HANGS}")
        os.ftruncate(self._said, 0)
        process = self._process = self._process or self._started()
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            _terminate(process)

        deadline = threading.Timer(_ANSWERS_WITHIN_S, end)
        deadline.start()
        try:
            answer = _exchanged(process, text)
        except (OSError, EOFError, ValueError) as error:
            # Of one that hangs the next would wait as long.
            self._hangs = is_late.is_set()
            why = _HANGS if self._hangs else self._why(process, error)
            raise OSError(f"{name}: {why}") from error
        finally:
            deadline.cancel()
        if isinstance(answer, str):
            raise OSError(f"{name}: {_first_error(self._said) or answer}")
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            module_command("appliance.probes.bcc_compiler"),
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )

    def _why(self, process: subprocess.Popen[bytes], error: Exception) -> str:
        """What it died of, or what made no sense of what it answered."""
        if isinstance(error, ValueError):
            _terminate(process)
        self._end()
        why = _first_error(self._said)
        if isinstance(error, ValueError):
            return f"the compiler's answer makes no sense: {why or error}"
        return f"the compiler has ended: {why or _status(process.returncode)}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # It ends when nothing more comes; what was not written to one that has ended is of no
        # use any more.
        with contextlib.suppress(BrokenPipeError), process:
            pass


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Also one that is stopped, which hears of it when it goes on."""
    process.terminate()
    process.send_signal(signal.SIGCONT)


def _exchanged(process: subprocess.Popen[bytes], text: bytes) -> bytes | str:
    """Code, or why there is none. EOFError, OSError: it has ended; ValueError: it answers nonsense."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"bytes": len(text)}).encode() + b"\n" + text)
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise EOFError
    match json.loads(line):
        case {"error": str(why)}:
            return why
        case {"bytes": int(size)} if 0 <= size <= _CODE_BYTES_MAX:
            code = process.stdout.read(size)
            if len(code) < size:
                raise EOFError
            return code
        case answer:
            raise ValueError(f"{answer!r}")


def _status(code: int) -> str:
    """Of a process that has ended; one below it that a signal ended counts as its own (128 + n)."""
    number = -code if code < 0 else code - 128
    try:
        return f"by {signal.Signals(number).name}"
    except ValueError:
        return f"exit status {code}"


def _first_error(said: int) -> str:
    """What a compiler minds first, of which more follows."""
    text = os.pread(said, _SAID_BYTES, 0).decode(errors="replace")
    return next((line.strip() for line in text.splitlines() if "error:" in line.lower()), "")
