# SPDX-License-Identifier: Apache-2.0
"""What goes over a Slices stream: chunks, compressed where that makes them smaller, and replies."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import backsight_pb2 as pb
import zstandard

from protocol.messages import (
    ACKS_MAX,
    CHUNK_BYTES_MAX,
    CHUNKS_MAX,
    SliceAck,
    SliceChunk,
    SliceReply,
    TraceId,
)
from protocol.wire import check

# zlib's own default: half the time of 9, all but a hundredth of its ratio.
_COMPRESSION_LEVEL = 6

# zstd's own default: a quarter of the time of zlib, and 3 % more bytes. Higher ones save one or two
# per cent.
_ZSTD_LEVEL = 3

# Each chunk of a list has some 50 bytes beside its data.
_SLICES_BYTES_MAX = CHUNK_BYTES_MAX + CHUNKS_MAX * 64


@dataclass(frozen=True, slots=True)
class Opening:
    """Who sends the chunks of a Slices stream; its first message, without a chunk.

    ``number``: by which its node knows the stream, in chunks on its Control stream.
    """

    node: str
    incarnation: int
    number: int = 0


def _checked_chunk(chunk: SliceChunk) -> SliceChunk:
    check.integer("slice_chunk.stream", chunk.stream, check.UINT32_MAX)
    check.trace("slice_chunk.trace", chunk.trace)
    check.integer("slice_chunk.offset", chunk.offset, check.INTEGER_MAX - CHUNK_BYTES_MAX)
    check.epoch("slice_chunk.epoch", chunk.epoch)
    if not chunk.data:
        raise check.WireError("slice_chunk.data", f"0 bytes; allowed: 1 to {CHUNK_BYTES_MAX}")
    return chunk


def within_bytes(size: int, limit: int = CHUNK_BYTES_MAX) -> None:
    """check.WireError for more data of all chunks of a message."""
    if size > limit:
        raise check.WireError("slice_chunk.data", f"{size} bytes; allowed: up to {limit}")


def _decompressed(data: bytes) -> bytes:
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(data, CHUNK_BYTES_MAX)
    except zlib.error as error:
        raise check.WireError("slice_chunk.data", f"no valid zlib stream: {error}") from error
    # The end of the stream follows the last byte, and may not have been read
    # when the output was full.
    if not inflater.eof and inflater.unconsumed_tail:
        try:
            more = inflater.decompress(inflater.unconsumed_tail, 1)
        except zlib.error as error:
            raise check.WireError("slice_chunk.data", f"no valid zlib stream: {error}") from error
        if more:
            raise check.WireError(
                "slice_chunk.data", f"inflates to more than {CHUNK_BYTES_MAX} bytes"
            )
    if not inflater.eof:
        raise check.WireError("slice_chunk.data", "the zlib stream is cut off")
    if inflater.unused_data:
        raise check.WireError("slice_chunk.data", "bytes follow the zlib stream")
    return plain


class Zstd:
    """Zstandard, for one thread. To make one costs more than a chunk."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def compressed(self, data: bytes) -> bytes:
        return self._compressor.compress(data)

    def plain(self, frame: bytes, before: int, limit: int) -> bytes:
        """What is in a frame of untrusted bytes, of a message with so many bytes before it, and at most."""
        try:
            size = zstandard.frame_content_size(frame)
            if size < 0:
                raise check.WireError(
                    "slice_chunk.data", "a zstd frame that says no size of its content"
                )
            within_bytes(before + size, limit)
            if len(frame) > size:
                raise check.WireError(
                    "slice_chunk.data", f"a zstd frame of {len(frame)} bytes holds {size}"
                )
            # It gets room for what it says, and no more.
            return self._decompressor.decompress(frame)
        except zstandard.ZstdError as error:
            raise check.WireError("slice_chunk.data", f"no valid zstd frame: {error}") from error


def encode_opening(opening: Opening) -> bytes:
    """Encode the first message of a Slices stream."""
    check.node_name("slice_chunk.node", opening.node)
    check.integer("slice_chunk.incarnation", opening.incarnation, check.UINT64_MAX)
    check.integer("slice_chunk.stream", opening.number, check.UINT32_MAX)
    return pb.SliceChunk(
        node=opening.node.encode(), incarnation=opening.incarnation, stream=opening.number
    ).SerializeToString()


def encode_chunks(chunks: Sequence[SliceChunk], zstd: Zstd | None = None) -> bytes:
    """Encode 1 to CHUNKS_MAX chunks, each compressed where that makes it smaller.

    More than one only to who knows Feature.CHUNK_LISTS; with ``zstd`` only to who knows that.
    """
    check.count("slice_chunk.further", chunks, CHUNKS_MAX, 1)
    within_bytes(sum(len(chunk.data) for chunk in chunks))
    first, *further = (chunk_out(chunk, zstd) for chunk in chunks)
    first.further.extend(further)
    return first.SerializeToString()


def chunk_out(chunk: SliceChunk, zstd: Zstd | None) -> pb.SliceChunk:
    """A chunk, compressed where that makes it smaller."""
    _checked_chunk(chunk)
    if zstd is None:
        compressed = zlib.compress(chunk.data, _COMPRESSION_LEVEL)
    else:
        compressed = zstd.compressed(chunk.data)
    is_smaller = len(compressed) < len(chunk.data)
    return pb.SliceChunk(
        trace=chunk.trace,
        offset=chunk.offset,
        data=compressed if is_smaller else chunk.data,
        compressed=is_smaller and zstd is None,
        zstd=is_smaller and zstd is not None,
        epoch=chunk.epoch,
        stream=chunk.stream,
    )


def chunk_in(
    part: pb.SliceChunk, zstd: Zstd | None, before: int, limit: int = CHUNK_BYTES_MAX
) -> SliceChunk:
    """A chunk of a message with so many bytes of data before it, and at most; checked."""
    sent = part.data
    within_bytes(before + len(sent), limit)
    if part.zstd:
        plain, frame = (zstd or Zstd()).plain(sent, before, limit), sent
    else:
        plain, frame = _decompressed(sent) if part.compressed else sent, b""
    within_bytes(before + len(plain), limit)
    return _checked_chunk(
        SliceChunk(TraceId(part.trace), part.offset, plain, part.epoch, frame, part.stream)
    )


def decode_slices_message(data: bytes, zstd: Zstd | None = None) -> Opening | list[SliceChunk]:
    """Decode what a node sent on a Slices stream; check.WireError if it is malformed."""
    if len(data) > _SLICES_BYTES_MAX:
        # Of chunks without anything, which cost memory and time only once they are parsed.
        raise check.WireError(
            "slice_chunk", f"{len(data)} bytes; allowed: up to {_SLICES_BYTES_MAX}"
        )
    message = pb.SliceChunk()
    check.parse(message, "slice chunk", data)
    if message.node:
        if message.trace or message.data or message.further:
            raise check.WireError(
                "slice_chunk.node", "stands in a message of its own, without a chunk"
            )
        return Opening(
            check.node_name("slice_chunk.node", check.utf8("slice_chunk.node", message.node)),
            message.incarnation,
            message.stream,
        )
    check.count("slice_chunk.further", message.further, CHUNKS_MAX - 1)
    chunks: list[SliceChunk] = []
    size = 0
    for part in (message, *message.further):
        if part is not message and (part.node or part.further):
            raise check.WireError("slice_chunk.further", "holds more than a chunk")
        chunks.append(chunk_in(part, zstd, size))
        size += len(chunks[-1].data)
    return chunks


def encode_slice_reply(reply: SliceReply) -> bytes:
    """Encode acks and credit."""
    check.count("slice_reply.acks", reply.acks, ACKS_MAX)
    message = pb.SliceReply(
        credit_bytes=check.integer("slice_reply.credit_bytes", reply.credit_bytes)
    )
    for ack in reply.acks:
        message.acks.add(
            trace=check.trace("slice_reply.acks.trace", ack.trace),
            offset=check.integer("slice_reply.acks.offset", ack.offset),
            epoch=check.epoch("slice_reply.acks.epoch", ack.epoch),
            again=ack.again,
        )
    return message.SerializeToString()


def decode_slice_reply(data: bytes) -> SliceReply:
    """Decode what a coordinator sent on a Slices stream; check.WireError if it is malformed."""
    message = pb.SliceReply()
    check.parse(message, "slice reply", data)
    check.count("slice_reply.acks", message.acks, ACKS_MAX)
    return SliceReply(
        tuple(
            SliceAck(
                check.trace("slice_reply.acks.trace", ack.trace),
                check.integer("slice_reply.acks.offset", ack.offset),
                check.epoch("slice_reply.acks.epoch", ack.epoch),
                ack.again,
            )
            for ack in message.acks
        ),
        check.integer("slice_reply.credit_bytes", message.credit_bytes),
    )
