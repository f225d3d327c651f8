# SPDX-License-Identifier: Apache-2.0
"""A process that imports what it is told: ``python3 floor_child.py``.

Told by lines on standard input, each answered by ``done``:

    import MODULE...    import these
    connect             run an event loop with a channel and a stream to nobody, as a node has them
"""

import sys

# Nothing else is imported here, nor any annotation made: it would be in the first step.

_PORT_OF_NOBODY = 9


def _connect() -> list[object]:
    """What is to be kept, so that it stays open."""
    import asyncio

    import grpc

    async def dial() -> list[object]:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{_PORT_OF_NOBODY}")
        call = channel.stream_stream("/backsight.v1.Coordinator/Control", None, None)(None)
        # Until it has tried, and knows that nobody is there.
        await call.code()
        return [channel, call]

    loop = asyncio.new_event_loop()
    return [loop, loop.run_until_complete(dial())]


def main() -> None:
    """Do as told until standard input ends."""
    kept = []
    for line in sys.stdin:
        match line.split():
            case ["import", *modules]:
                for module in modules:
                    __import__(module)
            case ["connect"]:
                kept.append(_connect())
            case _:
                sys.exit(f"what is {line!r}?")
        print("done", flush=True)


if __name__ == "__main__":
    main()
