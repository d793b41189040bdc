"""The store: an append-only, compressed file of records with one writer and any number of readers.

A record is one frame, visible to readers as soon as :meth:`StoreWriter.append` returns. Readers take whole frames only,
so a file may be read while it grows. A writer that dies loses at most the frame it was writing: the torn tail is
reported, and truncated when the next writer opens the file. There is no pickle; nothing in a store is executed.

    file   = header frame*
    header = magic "\\x89MWREC\\r\\n" (8 bytes), u32 version, u32 zero
    frame  = sync "\\xf5mwr" (4 bytes), u32 stored length, u32 raw length, u32 CRC-32 of the stored bytes,
             u32 CRC-32 of the 16 bytes before; then the stored bytes: zlib of the raw ones
    raw    = u32 length of the head, the head (JSON: version, lengths, edits, meta, extra); then tokens, spans and
             the logprobs of sampled tokens, each as byte planes (all lowest bytes first), and generated as bits

All numbers are little-endian. A frame whose check sums do not match is reported with its offset, and reading goes
on at the next frame.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from slime_plugin.errors import RecordError, StoreError
from slime_plugin.files import append_whole
from slime_plugin.record.interchange import VERSION, check_version
from slime_plugin.record.schema import Record, record_label

MAGIC = b"\x89MWREC\r\n"
SYNC = b"\xf5mwr"
STORE_VERSION = 1
SUFFIX = ".records"

_HEADER = struct.Struct("<8sII")
_FRAME = struct.Struct("<4sIII")
_CRC = struct.Struct("<I")
_FRAME_SIZE = _FRAME.size + _CRC.size
_MAX_RAW_BYTES = 2**28
"""A larger frame is damaged or hostile: no rollout has thirty million tokens."""
_LEVEL = 1
"""Of zlib. On byte planes of token ids, level 6 saves 6 % more and takes three times as long."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a store without a readable record."""

    offset: int
    message: str
    torn: bool = False
    """The file ends inside this frame: its writer died, or is still writing it."""


class StoreWriter:
    """Appends records to one file. One writer per file; a second one is refused.

    >>> with StoreWriter("run/rollout-0.records") as store:  # doctest: +SKIP
    ...     store.append(record)
    """

    def __init__(self, path: str | Path, *, durable: bool = False) -> None:
        """With ``durable``, every record is flushed to disk and survives a power cut, not only a crash."""
        self.path = Path(path)
        self.durable = durable
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115  # closed by close()
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}; choose another folder") from error
        try:
            self._lock()
            self._resume()
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Record) -> None:
        """Write one record. Readers see it once this returns."""
        frame = _frame(_encode(record))
        start = os.fstat(self._file.fileno()).st_size
        try:
            append_whole(self._file.fileno(), frame, sync=self.durable)
        except OSError as error:
            if os.fstat(self._file.fileno()).st_size > start:
                self._file.close()  # a part of the record could not be removed: what comes after it could not be read
            raise StoreError(
                f"{self.path}: {record.label} was not written: {error.strerror}; the {start} bytes before it are "
                "intact - free some space and append it again"
            ) from error

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        """Lock out other writers. A reader that finds an unfinished frame holds the lock briefly too."""
        for wait in (0.05, 0.2, 0.5, None):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if wait is not None:
                    time.sleep(wait)
            except OSError as error:
                raise StoreError(f"{self.path}: cannot be locked: {error.strerror}; use a local disk") from error
        raise StoreError(f"{self.path}: another writer has it open; give every writer a file of its own")

    def _resume(self) -> None:
        """Write the header of a new file, or truncate a torn tail."""
        size = os.fstat(self._file.fileno()).st_size
        if size < _HEADER.size:
            if size and not _HEADER.pack(MAGIC, STORE_VERSION, 0).startswith(self._read_all()):
                raise StoreError(f"{self.path}: not a record store; it will not be overwritten")
            self._file.truncate(0)
            append_whole(self._file.fileno(), _HEADER.pack(MAGIC, STORE_VERSION, 0))
            return
        with open(self.path, "rb") as file:
            for found in _frames(file, self.path, is_writer=True):
                if isinstance(found, Damage) and found.torn:
                    self._file.truncate(found.offset)
                    _log.warning("%s: cut off at byte %d: %s", self.path, found.offset, found.message)

    def _read_all(self) -> bytes:
        self._file.seek(0)
        return self._file.read()


def scan_store(path: str | Path) -> Iterator[Record | RecordError | Damage]:
    """Yield every frame of a store: its record, the error of an invalid record, or the damage.

    The scan covers what was there when it started. A torn tail is reported once the file has no writer; while it has
    one, an unfinished frame is skipped.
    """
    with open(path, "rb") as file:
        yield from scan_file(file, Path(path))


def scan_file(file: BinaryIO, path: Path) -> Iterator[Record | RecordError | Damage]:
    """:func:`scan_store` for a file that is open already; ``path`` is what messages call it."""
    for found in _frames(file, path):
        if isinstance(found, Damage):
            yield found
            continue
        offset, stored, raw_length = found
        try:
            yield _decode(stored, raw_length)
        except RecordError as error:
            yield error
        except _UndecodableError as error:
            yield Damage(offset, f"the frame at byte {offset} holds no record: {error}")


class _UndecodableError(Exception):
    """A frame with valid check sums and invalid content, written by another program."""


def _frames(file: BinaryIO, path: Path, *, is_writer: bool = False) -> Iterator[tuple[int, bytes, int] | Damage]:
    """Whole frames as (offset, stored bytes, raw length), and the damage between and after them.

    With ``is_writer`` the caller holds the lock, so that nobody else can be finishing the last frame.
    """
    size = os.fstat(file.fileno()).st_size
    if size == 0:  # just created by a writer
        return
    if size < _HEADER.size:
        if is_writer or not _has_writer(file):
            yield Damage(0, f"torn: the file ends after {size} of the {_HEADER.size} bytes of its header", torn=True)
        return
    file.seek(0)
    magic, version, _ = _HEADER.unpack(file.read(_HEADER.size))
    if magic != MAGIC:
        raise StoreError(f"{path}: not a record store")
    if version != STORE_VERSION:
        raise StoreError(
            f"{path}: store version {version} but this reader knows {STORE_VERSION}; upgrade memorywalker to read it"
        )
    offset = _HEADER.size
    while offset < size:  # not what is appended meanwhile: a busy writer could outrun this reader
        found = _frame_at(file, offset)
        if isinstance(found, _Unfinished):
            # Look for a writer first, then again: it may have finished the frame and closed in between.
            writing = not is_writer and _has_writer(file)
            found = _frame_at(file, offset)
            if isinstance(found, _Unfinished):
                if not writing:
                    yield Damage(offset, f"torn tail at byte {offset}: {found}", torn=True)
                return
        if isinstance(found, _Broken):
            following = _next_frame(file, offset + 1) if found.length is None else offset + found.length
            until = size if following is None else following
            yield Damage(offset, f"bytes {offset} to {until} are not a valid frame; the record in them is lost")
            if following is None:
                return
            offset = following
        else:
            yield offset, *found
            offset += _FRAME_SIZE + len(found[0])


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """A frame cut off by the end of the file, with no valid frame after it."""

    present: int
    wanted: int

    def __str__(self) -> str:
        return (
            f"the file ends after {self.present} of the {self.wanted} bytes of a frame; "
            "only the record being written is lost"
        )


@dataclass(frozen=True, slots=True)
class _Broken:
    """Bytes with a wrong check sum; ``length`` is known if the frame header is valid."""

    length: int | None


def _frame_at(file: BinaryIO, offset: int) -> tuple[bytes, int] | _Unfinished | _Broken:
    """Stored bytes and raw length of the frame at the offset."""
    left = os.fstat(file.fileno()).st_size - offset
    file.seek(offset)
    head = file.read(_FRAME_SIZE)
    if len(head) < _FRAME_SIZE:
        return _Unfinished(len(head), _FRAME_SIZE)
    if not _is_frame_header(head):
        return _Broken(None)
    _, stored_length, raw_length, crc = _FRAME.unpack_from(head)
    if left < _FRAME_SIZE + stored_length:  # before memory is allocated for it
        torn = _next_frame(file, offset + 1) is None  # if a valid frame follows, the length is wrong instead
        return _Unfinished(left, _FRAME_SIZE + stored_length) if torn else _Broken(None)
    stored = file.read(stored_length)
    return (stored, raw_length) if zlib.crc32(stored) == crc else _Broken(_FRAME_SIZE + stored_length)


def _is_frame_header(head: bytes) -> bool:
    return (
        len(head) == _FRAME_SIZE
        and head.startswith(SYNC)
        and _CRC.unpack_from(head, _FRAME.size)[0] == zlib.crc32(head[: _FRAME.size])
    )


def _next_frame(file: BinaryIO, start: int) -> int | None:
    """Offset of the next frame header with a valid check sum."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(SYNC, start)
        while at >= 0:
            if _is_frame_header(data[at : at + _FRAME_SIZE]):
                return at
            at = data.find(SYNC, at + 1)
    return None


def _has_writer(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _frame(raw: bytes) -> bytes:
    stored = zlib.compress(raw, _LEVEL)
    head = _FRAME.pack(SYNC, len(stored), len(raw), zlib.crc32(stored))
    return head + _CRC.pack(zlib.crc32(head)) + stored


def _encode(record: Record) -> bytes:
    spans = np.array([span for view in record.views for span in view], dtype="<i4")
    head = json.dumps(
        {
            "version": VERSION,
            "tokens": len(record),
            "spans": [len(view) for view in record.views],
            "edits": [edit.to_json() for edit in record.edits],
            "meta": record.meta.to_json(),
            "extra": dict(record.extra),
        },
        separators=(",", ":"),
        allow_nan=False,
    ).encode()
    return b"".join(
        (
            _CRC.pack(len(head)),
            head,
            _to_planes(record.tokens.astype("<i4", copy=False)),
            _to_planes(spans.reshape(-1)),
            _to_planes(record.logprobs[record.generated].astype("<f4", copy=False)),
            np.packbits(record.generated).tobytes(),
        )
    )


def _decode(stored: bytes, raw_length: int) -> Record:
    """Inverse of :func:`_encode`. Checks sizes only: the record checks its content."""
    if raw_length > _MAX_RAW_BYTES:
        raise _UndecodableError(f"it claims to unpack to {raw_length} bytes, at most {_MAX_RAW_BYTES} are read")
    unzip = zlib.decompressobj()
    try:
        raw = unzip.decompress(stored, raw_length + 1)
    except zlib.error as error:
        raise _UndecodableError(f"zlib says {error}") from None
    if len(raw) != raw_length or not unzip.eof:
        raise _UndecodableError(f"it does not unpack to the {raw_length} bytes it claims")
    try:
        head_end = _CRC.size + _CRC.unpack_from(raw)[0]
        head = json.loads(raw[_CRC.size : head_end])
        check_version(record_label(head.get("meta")), head.get("version"))
        length, spans_per_view = head["tokens"], head["spans"]
        edits, meta, extra = head["edits"], head["meta"], head["extra"]
        body = memoryview(raw)[head_end:]
        sizes = [length, 2 * sum(spans_per_view)]
        generated_bytes = -(-length // 8)
        sampled = (len(body) - generated_bytes) // 4 - sum(sizes)
        sizes.append(sampled)
        if min(sizes) < 0 or 4 * sum(sizes) + generated_bytes != len(body):
            raise _UndecodableError(f"its {len(body)} bytes of arrays do not fit {length} tokens")
        bounds = np.cumsum([0, *sizes]) * 4
        arrays = [_from_planes(body[a:b]) for a, b in pairwise(bounds)]
        flags = np.unpackbits(np.frombuffer(body[bounds[-1] :], np.uint8), count=length).view(np.bool_)
        if int(flags.sum()) != sampled:
            raise _UndecodableError(f"{sampled} log-probabilities for {int(flags.sum())} sampled tokens")
        logprobs = np.full(length, np.nan, dtype=np.float32)
        logprobs[flags] = arrays[2].view("<f4")
        spans = arrays[1].reshape(-1, 2).tolist()
    except (struct.error, KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise _UndecodableError(f"its head is not one of ours ({type(error).__name__})") from None
    views, at = [], 0
    for count in spans_per_view:
        views.append(spans[at : at + count])
        at += count
    return Record(arrays[0], flags, logprobs, views, edits, meta, extra)


def _to_planes(array: NDArray[Any]) -> bytes:
    """All lowest bytes, then all second bytes, and so on: equal high bytes become runs, which compress well."""
    return array.view(np.uint8).reshape(-1, 4).T.tobytes()


def _from_planes(data: memoryview) -> NDArray[np.int32]:
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view("<i4")
