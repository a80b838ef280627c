"""Plans: every output file, byte for byte, before a tensor byte is read."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from reshard._version import __version__
from reshard.engine.content import Literal
from reshard.engine.hashes import SEGMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.engine.content import Content

MANIFEST = "reshard.json"


class Part(NamedTuple):
    """A content at its offset in an output file.

    tensor: the name under which its hash is recorded, or None
    whole:  the content of the whole tensor, where this part is the stretch of it that begins at byte `at`
    """

    offset: int
    content: Content
    tensor: str | None
    whole: Content | None = None
    at: int = 0


@dataclass(frozen=True, eq=False)
class OutputFile:
    """One file: parts that follow each other without holes, from byte 0.

    `source` is set when the file as a whole equals an existing one: it is then reflinked or hard-linked where that is
    possible and asked for, else its one part copies the bytes. `carried` are the hashes that the source's own manifest
    has for it (segments, tensor name -> digest), or None: such a file is never hashed anew. `members` are the names of
    its tensors.
    """

    name: str
    parts: tuple[Part, ...]
    source: str | None = None
    carried: tuple[list[str], Mapping[str, str]] | None = None
    members: tuple[str, ...] = ()

    @cached_property
    def nbytes(self) -> int:
        return self.parts[-1].offset + self.parts[-1].content.nbytes if self.parts else 0

    @cached_property
    def offsets(self) -> list[int]:
        return [part.offset for part in self.parts]

    def overlapping(self, begin: int, end: int) -> Iterator[Part]:
        """Parts that hold bytes of [begin, end), in order."""
        index = max(bisect_right(self.offsets, begin) - 1, 0)
        while index < len(self.parts) and self.parts[index].offset < end:
            part = self.parts[index]
            if part.offset + part.content.nbytes > begin:
                yield part
            index += 1


class Segment(NamedTuple):
    """A unit of writing, hashing and resuming: bytes [begin, end) of file number `file`; `number` is its own."""

    number: int
    file: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Plan:
    """All that an output directory will hold.

    files:   tensor files, written as segments
    texts:   small files known beforehand, name -> bytes; written after the tensor files, in this order
    copies:  side files, name -> source path; copied whole
    dropped: source items that are not written, as {"name", "reason"}
    kept:    tensors left as they were where a transform might have changed them, as {"name", "reason"}
    sources: every file that tensor bytes come from -> its size
    notes:   what a person should know of this output; in reports only
    """

    files: tuple[OutputFile, ...]
    texts: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[Mapping[str, str], ...] = ()
    kept: tuple[Mapping[str, str], ...] = ()
    sources: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @cached_property
    def segments(self) -> list[Segment]:
        """Segments of all files, in order."""
        found: list[Segment] = []
        for index, file in enumerate(self.files):
            for begin in range(0, file.nbytes, SEGMENT_BYTES):
                found.append(Segment(len(found), index, begin, min(begin + SEGMENT_BYTES, file.nbytes)))
        return found

    @cached_property
    def digest(self) -> str:
        """Names the output: the same files with the same recipes have the same digest, wherever they come from."""
        sha = hashlib.sha256(f"reshard {__version__}\n".encode())
        for file in self.files:
            sha.update(f"file {json.dumps(file.name)} {file.nbytes} {'whole' if file.source else ''}\n".encode())
            for offset, content, tensor, *_ in file.parts:
                sha.update(f"{offset} {content.nbytes} {content.recipe()} {json.dumps(tensor)}\n".encode())
                if isinstance(content, Literal):
                    sha.update(content.data)
        for name, text in self.texts.items():
            sha.update(f"text {json.dumps(name)} {len(text)}\n".encode())
            sha.update(text)
        for name in self.copies:
            sha.update(f"side {json.dumps(name)}\n".encode())
        sha.update(json.dumps([list(self.dropped), list(self.kept)], default=dict, sort_keys=True).encode())
        return sha.hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        """The plan for `--dry-run --json`: files with their parts, and everything else by name."""
        return {
            "digest": self.digest,
            "bytes": self.nbytes,
            "segments": len(self.segments),
            "files": [
                {
                    "name": file.name,
                    "bytes": file.nbytes,
                    "whole_copy": file.source is not None,
                    "tensors": [
                        {
                            "name": part.tensor,
                            "offset": part.offset,
                            "bytes": part.content.nbytes,
                            "recipe": part.content.recipe(),
                        }
                        for part in file.parts
                        if part.tensor is not None
                    ]
                    or [{"name": name} for name in file.members],
                }
                for file in self.files
            ],
            "texts": list(self.texts),
            "side_files": list(self.copies),
            "dropped": [dict(row) for row in self.dropped],
            "kept": [dict(row) for row in self.kept],
        }
