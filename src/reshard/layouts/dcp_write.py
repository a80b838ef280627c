"""Writing torch DCP without torch and without a process group: files that `torch.distributed.checkpoint` reads.

A checkpoint is `.metadata` and `__0_N.distcp` (items back to back). Each tensor is cut into chunks of at most
`CHUNK_BYTES`, since torch's reader loads whole items; each chunk is one item. Their bytes are the business of
`dcp_bytes`.

A zip repeats the CRC of its data after the data, so the CRC of each chunk must be known before the plan is final:
`chunk_contents` lists what is to be read, and `plan_dcp` takes the results.

Nothing here depends on the machine or the time: the same tensors give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from reshard.engine.content import Literal
from reshard.engine.plan import OutputFile, Part
from reshard.errors import Refused, UsageError
from reshard.layouts.dcp_bytes import ALIGNMENT, Placed, item_bytes, item_size, metadata_bytes, torch_shape
from reshard.tensors.boxes import Box, whole
from reshard.tensors.dtypes import nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.engine.content import Content
    from reshard.tensors.read import Files

# Most bytes of one item. Also keeps every item far below the 4 GiB at which a zip needs its 64-bit form.
CHUNK_BYTES = 512 << 20

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape that each tensor has in the output, by name."""


class Chunk(NamedTuple):
    """A block of tensor `name` that becomes one item: `box` (in torch's shape), and the content of its bytes.

    key: its name in the table of CRCs; entire: whether it is the whole tensor
    """

    name: str
    key: str
    box: Box
    content: Content
    entire: bool


def split_boxes(shape: Sequence[int], itemsize: int, limit: int) -> Iterator[Box]:
    """Blocks of at most `limit` bytes, each one stretch of the C-ordered bytes, in order.

    The first axis longer than 1 is cut; where one row of it is too long, the axes below it are cut in turn.
    An empty tensor is one empty block, as torch writes it.
    """
    total = prod(shape) * itemsize
    if total <= limit:
        yield whole(shape)
        return
    axis = next(k for k, size in enumerate(shape) if size > 1)
    row = total // shape[axis]
    lead = (0,) * axis
    if row <= limit:
        for start in range(0, shape[axis], limit // row):
            size = min(limit // row, shape[axis] - start)
            yield Box((*lead, start, *(0 for _ in shape[axis + 1 :])), (*shape[:axis], size, *shape[axis + 1 :]))
        return
    below = list(split_boxes(shape[axis + 1 :], itemsize, limit))
    for index in range(shape[axis]):
        for box in below:
            yield Box((*lead, index, *box.start), (*shape[:axis], 1, *box.shape))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes [start, stop) of another content."""

    content: Content
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def fill(self, begin: int, end: int, out: memoryview, files: Files) -> None:
        self.content.fill(self.start + begin, self.start + end, out, files)

    def scratch(self) -> int:
        return self.content.scratch()

    def recipe(self) -> str:
        return f"bytes {self.start} to {self.stop} of {self.content.recipe()}"


def cut(contents: Mapping[str, Content], shapes: Shapes, *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Every chunk, in the order of writing. Raises Refused for a dtype that torch cannot hold."""
    for name, content in contents.items():
        dtype, shape = shapes[name]
        itemsize = item_size(dtype)
        expected = nbytes(dtype, shape)
        if content.nbytes != expected:
            raise Refused("shape", name, f"has {content.nbytes} bytes where {dtype} {list(shape)} needs {expected}")
        at = 0
        for number, box in enumerate(split_boxes(torch_shape(name, dtype, shape), itemsize, chunk_bytes)):
            size = box.numel * itemsize
            entire = size == content.nbytes
            part = content if entire else Stretch(content, at, at + size)
            yield Chunk(name, f"{name}[{number}]", box, part, entire)
            at += size


def chunk_contents(
    contents: Mapping[str, Content], shapes: Shapes, *, chunk_bytes: int = CHUNK_BYTES
) -> dict[str, Content]:
    """What `plan_dcp` needs the CRC-32 of, by key. Raises Refused for a dtype that torch cannot hold."""
    return {chunk.key: chunk.content for chunk in cut(contents, shapes, chunk_bytes=chunk_bytes)}


@lru_cache(maxsize=4096)
def _frame_sizes(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    head, tail = item_bytes(dtype, shape, 0)
    return len(head), len(tail)


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before (`tail` false) or after the payload of an item; rendered when asked for, then forgotten."""

    dtype: str
    shape: tuple[int, ...]
    crc: int
    tail: bool

    @property
    def nbytes(self) -> int:
        return _frame_sizes(self.dtype, self.shape)[self.tail]

    def fill(self, begin: int, end: int, out: memoryview, files: Files) -> None:
        out[:] = item_bytes(self.dtype, self.shape, self.crc)[self.tail][begin:end]

    def scratch(self) -> int:
        return 1 << 14

    def recipe(self) -> str:
        side = f"tail {self.crc:08x}" if self.tail else "head"
        return f"torch item {side} {self.dtype} {list(self.shape)}"


def plan_dcp(
    contents: Mapping[str, Content],
    shapes: Shapes,
    *,
    crcs: Mapping[str, int],
    prefix: str = "",
    max_file_bytes: int = 5_000_000_000,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[tuple[OutputFile, ...], dict[str, bytes]]:
    """The data files of a DCP checkpoint, and its `.metadata` as a small file that must be written after them.

    contents:       the bytes of each tensor, C-ordered, by name, in the order of writing
    shapes:         the dtype and shape that each has in the output
    crcs:           CRC-32 of everything in `chunk_contents(contents, shapes)`, by key
    prefix:         dotted keys around the names: "app.model" makes a checkpoint that loads as {"app": {"model": {...}}}
    max_file_bytes: a new file is begun where an item would pass this; an item is never cut

    The chunks of a larger tensor are stretches of it, recorded together under its name.
    """
    wrapper = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    if not all(wrapper):
        raise UsageError("prefix", prefix, "has an empty part", "give dotted keys such as app.model")
    files: list[list[Part]] = []
    at = 0
    placed: dict[str, list[Placed]] = {name: [] for name in contents}
    for name, key, box, payload, entire in cut(contents, shapes, chunk_bytes=chunk_bytes):
        dtype = shapes[name][0]
        head = Frame(dtype, box.shape, crcs[key], tail=False)
        tail = Frame(dtype, box.shape, crcs[key], tail=True)
        size = head.nbytes + payload.nbytes + tail.nbytes
        # Items start aligned in their file, so that their payloads, aligned within the item, are aligned in the file.
        start = at + -at % ALIGNMENT
        if not files or (at and start + size > max_file_bytes):
            files.append([])
            at = start = 0
        if start > at:
            files[-1].append(Part(at, Literal(b"\0" * (start - at)), None))
        placed[name].append(Placed(box, f"__0_{len(files) - 1}.distcp", start, size))
        files[-1].append(Part(start, head, None))
        whole = None if entire else contents[name]
        begin = payload.start if isinstance(payload, Stretch) else 0
        files[-1].append(Part(start + head.nbytes, payload, name, whole, begin))
        files[-1].append(Part(start + size - tail.nbytes, tail, None))
        at = start + size
    outputs = tuple(OutputFile(f"__0_{number}.distcp", tuple(parts)) for number, parts in enumerate(files))
    return outputs, {".metadata": metadata_bytes({name: shapes[name] for name in contents}, placed, wrapper)}
