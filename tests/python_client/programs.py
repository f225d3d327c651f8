# SPDX-License-Identifier: Apache-2.0
"""Programs that use the client, each run in a process of its own by the tests.

``python3 -m tests.python_client.programs NAME`` runs the function of that name
and prints what it returns as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import backsight
from tests.python_client.shown import shown

# Plain data, printed as JSON.
Result: TypeAlias = dict[str, object]

ATTACH_S = 30.0

# The threads of a process that find a segment to write to before the node has
# noticed them (STOCK_MIN in native/src/node/pool.c). Programs whose every record
# is asked for use no more of them, and fill no more than a segment in each, so
# that nothing is lost on a machine too busy to let the node run in time.
THREADS = 4

MANY = 400
"""Traces that many_traces() writes."""

LONG_NAME = "GET /products/{id}/recommendations?currency=€ of the frontend"
START_NS = 1_700_000_000_000_000_000


def trace_id(number: int) -> str:
    """The programs' traces: 1, 2, 3 ..., in both halves of the id."""
    return f"{number:016x}{~number & (1 << 64) - 1:016x}"


def _attach() -> None:
    if not backsight.wait_attached(ATTACH_S):
        raise SystemExit("not attached")


def _stats() -> Result:
    return dataclasses.asdict(backsight.stats())


def _start(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()


def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()


# --------------------------------------------------------------- both forms


def handle_form() -> Result:
    """Everything that a Trace can do."""
    _attach()
    with backsight.Trace(trace_id(1)) as trace:
        trace.write(b"bytes")
        trace.write(bytearray(b"bytearray"))
        trace.write(memoryview(b"-strided-")[1::2])
        trace.write(b"")
        trace.write(bytes(range(256)) * 128)
        trace.span_start(0xA, 0, START_NS, "root", backsight.SpanKind.SERVER)
        trace.span_start(0xB, 0xA, START_NS + 1, LONG_NAME)
        value = trace.serialize(0xB)
        trace.breadcrumb("other-node")
        trace.breadcrumb(backsight.node_ref())
        trace.span_end(0xB, START_NS + 5)
        trace.span_end(
            0xA,
            START_NS + 9,
            backsight.SpanStatus.ERROR,
            {"pod": "cart-1", "n": -7, "share": 0.5, "ok": True, "raw": b"\0\xff"},
        )
        trace.span_start(0xC, 0xA, START_NS + 8, "unfinished")
    with backsight.Trace(bytes.fromhex(trace_id(2))) as callee:
        callee.deserialize(0xB, value)
    return {"value": value, "node_ref": backsight.node_ref(), **_stats()}


def thread_form() -> Result:
    """The same by the functions, on two threads at a time."""
    _attach()
    values: queue.Queue[str] = queue.Queue()

    def caller() -> None:
        backsight.begin(trace_id(1))
        backsight.tracepoint(b"caller")
        backsight.breadcrumb("other-node")
        values.put(backsight.serialize(0xB))
        barrier.wait()
        backsight.tracepoint(bytearray(b"caller again"))
        backsight.end()

    def callee() -> None:
        backsight.begin(bytes.fromhex(trace_id(2)))
        backsight.deserialize(0xB, values.get())
        barrier.wait()
        backsight.tracepoint(memoryview(b"callee"))
        backsight.begin(trace_id(3))  # ends the one before
        backsight.tracepoint(b"third")
        # never ended: it ends with the thread

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=caller), threading.Thread(target=callee)]
    _start(threads)
    _join(threads)
    backsight.end()  # none is open here
    backsight.tracepoint(b"nowhere")
    return _stats()


def triggers() -> Result:
    _attach()
    with backsight.Trace(trace_id(1)) as trace:
        trace.write(b"x")
        trace.trigger("slow.get-cart", "ü" * 95, [trace_id(7), bytes.fromhex(trace_id(8))])
    trace.trigger("After close: 12345678901234567890 and more")
    trace.trigger("")
    backsight.trigger(trace_id(2), "from_outside", "", (trace_id(n) for n in range(10, 60)))
    return _stats()


# ---------------------------------------------------------------- lifetimes


def closed_and_forgotten() -> Result:
    """Traces that end without close(): by an exception, by garbage collection."""
    _attach()
    trace = backsight.Trace(trace_id(1))
    with contextlib.suppress(KeyError), trace:
        trace.write(b"1")
        raise KeyError
    forgotten = backsight.Trace(trace_id(2))
    forgotten.write(b"2")
    del forgotten

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.trace = backsight.Trace(trace_id(3))

    Cycle().trace.write(b"3")
    gc.collect()
    return {"closed": trace.closed}


def late_calls() -> Result:
    """Every call on a closed trace, a zero trace and after a second close."""
    _attach()
    closed = backsight.Trace(trace_id(1))
    closed.write(b"before")
    closed.close()
    closed.close()
    for trace in (closed, backsight.Trace(bytes(16))):
        trace.write(b"late")
        trace.span_start(1, 0, START_NS, LONG_NAME)
        trace.span_end(1, START_NS, attributes={"a": 1})
        trace.breadcrumb("late")
        trace.deserialize(1, "late")
        trace.serialize(1)
        trace.close()
    backsight.begin(bytes(16))
    backsight.tracepoint(b"late")
    backsight.end()
    return _stats()


def shutdown() -> None:
    """The interpreter goes down while handles are open and daemon threads write."""
    _attach()
    kept = backsight.Trace(trace_id(5))
    kept.write(b"kept")
    sys.modules["kept_until_the_end"] = kept  # type: ignore[assignment]
    started = threading.Barrier(THREADS)

    def write_for_ever(number: int) -> None:
        with backsight.Trace(trace_id(number)) as trace:
            trace.write(b"start")
            started.wait()
            # As many as the pool holds: a machine may be slow to end a process.
            for _ in range(20_000):
                trace.write(b"x" * 100)
                backsight.begin(trace_id(100 + number))
                backsight.tracepoint(b"y")
                backsight.end()
            threading.Event().wait()

    for number in range(1, THREADS):
        threading.Thread(target=write_for_ever, args=(number,), daemon=True).start()
    started.wait()


def killed() -> None:
    """Killed by its parent in mid-request."""
    _attach()
    trace = backsight.Trace(trace_id(1))
    trace.write(b"before the end")
    trace.span_start(1, 0, START_NS, "for ever")
    print("written", flush=True)
    signal.pause()


# ------------------------------------------------------------------ threads


def more_threads_than_slots() -> Result:
    """300 threads of which 256 can write; all live at the same time."""
    _attach()
    barrier = threading.Barrier(301)

    def work(number: int) -> None:
        with backsight.Trace(trace_id(number)) as trace:
            trace.write(b"x" * 10)
            barrier.wait()  # all have written
            barrier.wait()  # and were counted

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 301)]
    _start(threads)
    barrier.wait()
    alive = _stats()
    barrier.wait()
    _join(threads)

    # Their slots are free again.
    def reuse() -> None:
        with backsight.Trace(trace_id(1000)) as trace:
            trace.write(b"again")

    one_more = threading.Thread(target=reuse)
    _start([one_more])
    _join([one_more])
    return {"alive": alive, "after": _stats()}


def threads_share_a_trace() -> Result:
    """One handle, several threads; each also has its own thread-local trace."""
    _attach()
    barrier = threading.Barrier(THREADS - 1)
    with backsight.Trace(trace_id(1)) as trace:

        def work(number: int) -> None:
            barrier.wait()
            backsight.begin(trace_id(100 + number))
            for i in range(200):
                trace.write(f"{number} {i}".encode())
                backsight.tracepoint(f"{number} {i}".encode())
            backsight.end()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS - 1)]
        _start(threads)
        _join(threads)
    return _stats()


def closed_by_the_first_writer() -> Result:
    """A thread that wrote, then another thread, then the first one closes."""
    _attach()
    trace = backsight.Trace(trace_id(1))
    trace.write(b"first")
    other = threading.Thread(target=trace.write, args=(b"second",))
    _start([other])
    _join([other])
    trace.close()
    return _stats()


def close_under_writers() -> Result:
    """A close on one thread while others still write: nothing breaks, nothing comes after it."""
    _attach()
    with ThreadPoolExecutor(THREADS - 1) as pool:
        for number in range(1, 61):
            trace = backsight.Trace(trace_id(number))
            trace.write(b"first")
            barrier = threading.Barrier(THREADS - 1)

            def write(trace: backsight.Trace = trace, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                for _ in range(20):
                    trace.write(b"more")

            def close(trace: backsight.Trace = trace, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                trace.close()

            for future in [pool.submit(work) for work in (write, write, close)]:
                future.result()
    return _stats()


def turns_of_another_thread() -> Result:
    """How often another thread gets its turn during calls that should not give it one."""
    _attach()
    turns = 0
    stop = False

    def take_every_turn() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)  # gives the turn back

    other = threading.Thread(target=take_every_turn)
    calls = 10_000
    with backsight.Trace(trace_id(1)) as trace:
        _start([other])
        # From now on nobody is made to give up the GIL, in any test's lifetime.
        sys.setswitchinterval(3600)
        before = turns
        for _ in range(calls):
            trace.write(b"x")
            backsight.begin(trace_id(2))
            backsight.tracepoint(b"y")
            backsight.end()
        during = turns - before
        stop = True
    _join([other])
    return {"calls": 4 * calls, "turns": during}


# -------------------------------------------------------------------- fork


def _use_inherited(inherited: backsight.Trace) -> None:
    """Whatever a child may do with its parent's trace."""
    inherited.write(b"child")
    inherited.span_start(9, 0, START_NS, LONG_NAME)
    inherited.span_end(9, START_NS, attributes={"child": True})
    inherited.breadcrumb("child")
    inherited.serialize(9)


def fork() -> Result:
    """A child of a process that has threads and open traces in both forms."""
    _attach()
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            with backsight.Trace(trace_id(50)) as trace:
                trace.write(b"busy")

    inherited = backsight.Trace(trace_id(1))
    inherited.write(b"parent")
    backsight.begin(trace_id(2))
    backsight.tracepoint(b"parent")
    threads = [threading.Thread(target=busy) for _ in range(THREADS - 1)]
    _start(threads)
    children = 8
    for number in range(children):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                before = backsight.stats()
                _use_inherited(inherited)
                backsight.tracepoint(b"child")
                backsight.end()
                inherited.close()
                with backsight.Trace(trace_id(10)):
                    pass  # asks for an attachment
                _attach()
                with backsight.Trace(trace_id(3)) as own:
                    own.write(f"child {number}".encode())
                    _use_inherited(inherited)
                backsight.begin(trace_id(4))
                backsight.tracepoint(f"child {number}".encode())
                backsight.end()
                fresh = (before.attachments, before.runs, before.attached) == (0, 0, False)
                status = 0 if fresh and backsight.stats().attachments == 1 else 2
            finally:
                os._exit(status)
        if status := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            raise SystemExit(f"child {number}: {status}")
    inherited.write(b"parent again")
    backsight.tracepoint(b"parent again")
    backsight.end()
    inherited.close()
    stop.set()
    _join(threads)
    return {"pid": os.getpid(), "children": children, **_stats()}


def _process_target(number: int) -> int:
    _attach()
    with backsight.Trace(trace_id(3)) as trace:
        trace.write(f"{number}".encode())
    return os.getpid()


def _multiprocessing(method: str) -> Result:
    _attach()
    inherited = backsight.Trace(trace_id(1))
    inherited.write(b"parent")
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        pids = pool.map(_process_target, range(4), chunksize=1)
        pool.close()
        pool.join()
    inherited.close()
    return {"pid": os.getpid(), "pids": sorted(set(pids))}


def multiprocessing_fork() -> Result:
    return _multiprocessing("fork")


def multiprocessing_spawn() -> Result:
    return _multiprocessing("spawn")


def multiprocessing_forkserver() -> Result:
    return _multiprocessing("forkserver")


# ----------------------------------------------------------------- asyncio


def asyncio_tasks() -> Result:
    """50 requests interleave on one thread; deep code asks for the current trace."""
    _attach()
    tasks = 50

    async def deep(number: int, step: int) -> None:
        trace = backsight.current()
        if trace is None:
            raise SystemExit("no current trace")
        trace.write(f"{number} {step}".encode())

    async def request(number: int) -> None:
        with backsight.Trace(trace_id(number)) as trace:
            for step in range(10):
                await asyncio.sleep(0)
                await deep(number, step)
            # A child task inherits it, a thread too where asyncio starts it.
            await asyncio.create_task(deep(number, 10))
            await asyncio.to_thread(_write_current, f"{number} 11")
            with backsight.Trace(trace_id(1000 + number)) as inner:
                if backsight.current() is not inner:
                    raise SystemExit("the inner trace is not current")
                await asyncio.sleep(0)
                await deep(number, 12)
            if backsight.current() is not trace:
                raise SystemExit("the outer trace is not current again")
        if backsight.current() is not None:
            raise SystemExit("a closed trace is current")

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS - 1))
        await asyncio.gather(*(request(number) for number in range(1, tasks + 1)))

    asyncio.run(main())
    return {"tasks": tasks, **_stats()}


def _write_current(text: str) -> None:
    trace = backsight.current()
    if trace is None:
        raise SystemExit("no current trace in the thread")
    trace.write(text.encode())


def asyncio_cancelled() -> Result:
    """A cancelled task closes its trace; a task that outlives its request does no harm."""
    _attach()

    async def main() -> None:
        entered = asyncio.Event()

        async def endless() -> None:
            with backsight.Trace(trace_id(1)) as trace:
                trace.write(b"endless")
                entered.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(endless())
        await entered.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

        closed = asyncio.Event()
        outlived: list[bool] = []

        async def straggler() -> None:
            trace = backsight.current()
            await closed.wait()
            if trace is not None:
                trace.write(b"late")
            outlived.append(backsight.current() is None)

        with backsight.Trace(trace_id(2)) as request:
            request.write(b"request")
            task = asyncio.create_task(straggler())
            await asyncio.sleep(0)
        closed.set()
        await task
        if outlived != [True]:
            raise SystemExit("a closed trace is current in a child task")

    asyncio.run(main())
    return _stats()


def asyncio_generator() -> Result:
    """A generator that the event loop finalises leaves its block in another context."""
    _attach()

    async def rows() -> AsyncIterator[int]:
        with backsight.Trace(trace_id(1)) as trace:
            trace.write(b"row")
            yield 1
            yield 2

    async def main() -> None:
        async def reader() -> None:
            async for _ in rows():
                break

        await asyncio.create_task(reader())
        gc.collect()

    asyncio.run(main())
    return _stats()


# ----------------------------------------------------------- without a node


def unattached() -> Result:
    """Everything, and nobody to attach to."""
    with backsight.Trace(trace_id(1)) as trace:
        trace.write(b"lost")
        trace.span_start(1, 0, START_NS, LONG_NAME)
        trace.span_end(1, START_NS, attributes={"a": 1})
        trace.breadcrumb("node")
        trace.deserialize(1, "x")
        trace.serialize(1)
        trace.trigger("slow", "why", [trace_id(2)])
    backsight.begin(trace_id(1))
    backsight.tracepoint(b"lost")
    backsight.serialize(1)
    backsight.deserialize(1, "x")
    backsight.breadcrumb("node")
    backsight.end()
    return {"node_ref": backsight.node_ref(), "waited": backsight.wait_attached(0), **_stats()}


def refused() -> Result:
    """What costs the record in question, and is counted."""
    _attach()
    with backsight.Trace(trace_id(1)) as trace:
        trace.write(b"x" * 32768)
        trace.write(b"x" * 32769)
        trace.deserialize(1, "§ no context")
        trace.breadcrumb("Not A Node! " * 30)
        trace.breadcrumb("")
        trace.span_start(1, 0, START_NS, "n" * 5000)
        trace.span_end(1, START_NS, attributes={"big": "v" * 40000, "after": 1})
    backsight.begin(trace_id(2))
    backsight.tracepoint(b"x" * 32769)
    backsight.deserialize(1, "")
    backsight.end()
    return _stats()


def interrupted() -> Result:
    """Ctrl-C gets through while it waits for a daemon that never comes."""
    # A shell that runs tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        backsight.wait_attached(3600)
    except KeyboardInterrupt:
        return {"interrupted": True}
    return {"interrupted": False}


def many_traces() -> Result:
    """As many as lie in one segment, 24 KB of it."""
    _attach()
    for number in range(1, MANY + 1):
        with backsight.Trace(trace_id(number)) as trace:
            trace.write(b"12345678")
    return _stats()


# -------------------------------------------------- what threads show


def _number_shown() -> int:
    """Of the trace that this thread shows, as trace_id() has it; 0: none."""
    found = shown()
    return next(number for number in range(1000) if found == (trace_id(number) if number else ""))


def shown_in_blocks() -> Result:
    """Within and around blocks, on the thread and on one beside it."""
    _attach()
    numbers = [_number_shown()]
    with backsight.Trace(trace_id(1)):
        numbers.append(_number_shown())
        with backsight.Trace(trace_id(2)):
            numbers.append(_number_shown())
            with ThreadPoolExecutor(1) as pool:
                numbers.append(pool.submit(_number_shown).result())
        numbers.append(_number_shown())
    return {"numbers": [*numbers, _number_shown()]}


def shown_after_others_close() -> Result:
    """A thread that idles in a block whose trace another one closes."""
    _attach()
    trace = backsight.Trace(trace_id(1))
    is_in, is_closed = threading.Event(), threading.Event()
    numbers = []

    def idle() -> None:
        with trace:
            numbers.append(_number_shown())
            is_in.set()
            is_closed.wait()
            numbers.append(_number_shown())

    thread = threading.Thread(target=idle)
    thread.start()
    is_in.wait()
    trace.close()
    is_closed.set()
    thread.join()
    return {"numbers": numbers}


def shown_in_tasks() -> Result:
    """By each of many tasks whose steps interleave, at each step."""
    _attach()
    wrong: list[tuple[int, int]] = []

    def look(number: int) -> None:
        if (found := _number_shown()) != number:
            wrong.append((number, found))

    async def child(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            look(number)

    async def request(number: int) -> None:
        with backsight.Trace(trace_id(number)):
            for _ in range(5):
                await asyncio.sleep(0)
                look(number)
            await asyncio.create_task(child(number))
            with backsight.Trace(trace_id(number + 100)):
                await asyncio.sleep(0)
                look(number + 100)
            await asyncio.to_thread(look, 0)
            look(number)

    async def without_a_trace() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
            look(0)

    async def main() -> None:
        await asyncio.gather(without_a_trace(), *(request(number) for number in range(1, 11)))
        look(0)

    asyncio.run(main())
    return {"wrong": wrong}


def waits_an_hour() -> Result:
    return {"attached": backsight.wait_attached(3600)}


def main() -> None:
    program: Callable[[], Result | None] = globals()[sys.argv[1]]
    print(json.dumps(program()))


if __name__ == "__main__":
    main()
