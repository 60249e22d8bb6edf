"""How a value looks on the wire: one JSON head, then the raw bytes of its tensors, cut into chunks.

The head is `{"tag": ..., "value": skeleton, "tensors": [[dtype, shape], ...]}`. Sending copies
nothing: chunks are views of the tensors. Receiving checks the head before it allocates the tensors,
and fills them as the chunks arrive.
"""

from __future__ import annotations

import json
import math
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from lightning_hiertrain.transport.packing import pack, unpack

MAX_CHUNK_BYTES = 4 << 20
"""The largest chunk that a receiver takes."""
MAX_HEAD_BYTES = 256 << 20
MAX_MESSAGE_BYTES = 64 << 30
_MAX_VIEWS = 128

_DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}


class MalformedError(ValueError):
    """Bytes that no sender of this version makes.

    Args:
        kind: What is wrong, always in the same words.
        detail: The values.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} {detail}".strip())
        self.kind = kind
        self.detail = detail


@dataclass(kw_only=True)
class Message:
    """A value that has arrived: its skeleton, its tensors and the tag that it was sent under."""

    tag: str
    header: Any
    """The skeleton that `pack` made."""
    tensors: list[torch.Tensor]
    num_bytes: int = 0
    """How long it was on the wire."""
    began: float = 0.0
    """When its first chunk arrived."""
    arrived: float = 0.0
    """When its last chunk arrived."""

    def value(self) -> Any:
        """Puts the value together."""
        return unpack(self.header, self.tensors)


def encode(tag: str, value: Any) -> Outgoing:
    """Prepares a value for sending.

    Raises:
        TypeError: If the value holds something that cannot travel.
    """
    skeleton, tensors = pack(value)
    specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    head = json.dumps(
        {"tag": tag, "value": skeleton, "tensors": specs}, separators=(",", ":")
    ).encode()
    views = [memoryview(head), *(byte_view(tensor) for tensor in tensors)]
    return Outgoing(head_bytes=len(head), views=[view for view in views if view.nbytes])


def packed_bytes(value: Any) -> int:
    """Returns how many bytes a value takes on the wire, without the few that each chunk adds."""
    return encode("", value).total_bytes


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor: those of its own memory if it is contiguous and on the CPU."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(kw_only=True)
class Outgoing:
    """A message on its way out."""

    head_bytes: int
    views: list[memoryview]

    def __post_init__(self) -> None:
        self.total_bytes = sum(view.nbytes for view in self.views)
        self._rest = deque(self.views)

    def again(self) -> Outgoing:
        """Returns the same message for another peer."""
        return Outgoing(head_bytes=self.head_bytes, views=self.views)

    def take(self, max_bytes: int) -> list[memoryview]:
        """Cuts off the next chunk, as views; empty at the end."""
        chunk: list[memoryview] = []
        while self._rest and max_bytes and len(chunk) < _MAX_VIEWS:
            view = self._rest.popleft()
            if view.nbytes > max_bytes:
                self._rest.appendleft(view[max_bytes:])
                view = view[:max_bytes]
            chunk.append(view)
            max_bytes -= view.nbytes
        return chunk


class Incoming:
    """A message that is arriving.

    Args:
        head_bytes: The announced length of the head.
        total_bytes: The announced length of head and tensors.

    Raises:
        MalformedError: If the lengths are impossible.
    """

    def __init__(self, head_bytes: Any, total_bytes: Any) -> None:
        if type(head_bytes) is not int or type(total_bytes) is not int:
            raise MalformedError("lengths that are no numbers")
        if (
            not 0 < head_bytes <= MAX_HEAD_BYTES
            or not head_bytes <= total_bytes <= MAX_MESSAGE_BYTES
        ):
            lengths = f"(a head of {head_bytes} in a message of {total_bytes} bytes)"
            raise MalformedError("impossible lengths", lengths)
        self.missing_bytes = self._total_bytes = total_bytes
        self._began = perf_counter()
        self._tensor_bytes = total_bytes - head_bytes
        self._head = bytearray()
        self._head_bytes = head_bytes
        self._message: Message | None = None
        self.is_broken = False
        """Whether its head was not one."""
        self._room: deque[memoryview] = deque()

    def feed(self, pieces: list[memoryview]) -> Message | None:
        """Takes the next bytes.

        Returns:
            The message, if these were its last ones.

        Raises:
            MalformedError: If they are more than announced, and then nothing is taken, or the head
                is not one, and then what else comes of the message is taken and thrown away.
        """
        num_bytes = sum(piece.nbytes for piece in pieces)
        if num_bytes > self.missing_bytes:
            raise MalformedError("more bytes than the message announced")
        self.missing_bytes -= num_bytes
        if not self.is_broken:
            for piece in pieces:
                self._fill(piece)
        if self.missing_bytes or self._message is None:
            return None
        self._message.num_bytes = self._total_bytes
        self._message.began, self._message.arrived = self._began, perf_counter()
        return self._message

    def _fill(self, piece: memoryview) -> None:
        if self._message is None:
            missing = self._head_bytes - len(self._head)
            self._head += piece[:missing]
            piece = piece[missing:]
            if len(self._head) == self._head_bytes:
                self.is_broken = True
                self._message = self._allocate()
                self.is_broken = False
        while piece.nbytes:
            room = self._room[0]
            length = min(room.nbytes, piece.nbytes)
            room[:length] = piece[:length]
            piece = piece[length:]
            if length == room.nbytes:
                self._room.popleft()
            else:
                self._room[0] = room[length:]

    def _allocate(self) -> Message:
        try:
            head = json.loads(self._head)
            tag, skeleton, specs = head["tag"], head["value"], head["tensors"]
            layouts = [(_DTYPES[dtype], _checked_shape(shape)) for dtype, shape in specs]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MalformedError("a head that cannot be read", f"({error!r:.200})") from error
        if type(tag) is not str:
            raise MalformedError("a tag that is no text")
        announced = sum(math.prod(shape) * dtype.itemsize for dtype, shape in layouts)
        if announced != self._tensor_bytes:
            lengths = f"({announced} in a body of {self._tensor_bytes} bytes)"
            raise MalformedError("tensors that do not fill the message", lengths)
        try:
            tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in layouts]
        except RuntimeError as error:
            raise MalformedError("tensors too large for this tier", f"({error!r:.200})") from error
        self._room.extend(view for view in map(byte_view, tensors) if view.nbytes)
        self._head = bytearray()
        return Message(tag=tag, header=skeleton, tensors=tensors)


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(
        type(size) is int and 0 <= size < 2**48 for size in shape
    ):
        raise MalformedError("an impossible shape", f"({shape!r:.80})")
    if len(shape) > 64:
        raise MalformedError("a tensor of more than 64 dimensions")
    return tuple(shape)
