"""Looking ahead in `.metadata`: whole entries recognised by one regular expression each.

All entries of one kind are the same opcodes with other numbers and texts, so once the first has been executed, and the
memo numbers of the class and of the field names are known, the rest is matched as bytes. Whatever does not match
(a frame boundary inside an entry, an unusual number, a shared object) is left to the machine, opcode by opcode. Objects
that are passed over are counted, so that memo numbers stay right, but not recorded.
"""

from __future__ import annotations

import re
import struct
from array import array
from typing import TYPE_CHECKING, Any

from reshard.layouts.dcp.entries import ChunkList, TensorEntry
from reshard.layouts.dcp.light import CHUNK, INDEX, SIZE, STORAGE_INFO, TENSOR, Global, Instance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.dcp.metadata import MetadataMachine

# BININT1, BININT2, BININT, and LONG1 of 5 and 6 bytes (up to 128 TiB).
INT = rb"(?:K.|M..|J....|\x8a\x05.{5}|\x8a\x06.{6})"
ANY_GET = rb"(?:h.|j....)"
NEW = rb"\)\x81\x94\}\x94\("  # an instance and the start of its state
# A tuple of one to three, or of more, numbers; then its argument tuple, the call of torch.Size, and its memo.
SOME_INTS = rb"(?:" + INT + rb"{1,3}[\x85-\x87]\x94|\(" + INT + rb"{4,64}t\x94)"
# A text with its length, or a reference to one. Longer or non-ASCII texts are left to the machine.
TEXT = rb"(?:(" + ANY_GET + rb")|\x8c(.)([\x20-\x7e]*)\x94)"
# A key, and its path: references, and the last element as a new text. At most three elements.
PATH = re.compile(TEXT + b"(" + ANY_GET + rb"{0,2})\x8c(.)([\x20-\x7e]*)\x94([\x85-\x87])\x94", re.DOTALL)
SKIP = 64
CACHE = 1 << 16
TRIES = 40


def _int(data: bytes) -> int:
    code = data[0]
    if code == 0x4B:
        return data[1]
    if code == 0x4D:
        return data[1] | data[2] << 8
    return int.from_bytes(data[1 if code == 0x4A else 2 :], "little", signed=True)


_WIDTHS = {0x4B: 2, 0x4D: 3, 0x4A: 5}


def _ints(data: bytes) -> tuple[int, ...] | None:
    """The numbers of a tuple as matched; None where they are not as many as its opcode takes."""
    if data == b")":
        return ()
    code = data[-2]
    at, end = int(code == 0x74), len(data) - 2
    values = []
    while at < end:
        width = _WIDTHS.get(data[at]) or 2 + data[at + 1]
        values.append(_int(data[at : at + width]))
        at += width
    return tuple(values) if code == 0x74 or len(values) == code - 0x84 else None


def _number(get: bytes) -> int:
    return get[1] if len(get) == 2 else int.from_bytes(get[1:], "little")


def _gets(numbers: Sequence[int]) -> bytes:
    ops = (b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n) for n in numbers)
    return b"(?:" + b"|".join(map(re.escape, ops)) + b")"


class LookAhead:
    """The part of the metadata machine that recognises whole entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patterns: dict[str, Any] = {}
        self._tries = 0
        self._cache: dict[bytes, tuple[int, ...]] = {}
        self._prefixes: dict[bytes, tuple[str | int, ...]] = {}
        self._properties: dict[bytes, Instance] = {}

    def look_ahead(self: Any, found: Global, number: int) -> bool:
        if self.everything or not self.outer or not self.outer[-1]:
            return False
        target = self.outer[-1][-1]
        state, storage = self.sinks.get("state_dict_metadata"), self.sinks.get("storage_data")
        if found is CHUNK:
            return type(target) is ChunkList and self._has_pattern("chunk") and _chunks(self, target)
        if found is TENSOR:
            return target is state and len(self.stack) % 2 == 1 and self._has_pattern("tensor") and _tensor(self)
        return (
            found is INDEX
            and target is storage
            and len(self.stack) % 2 == 0
            and self._has_pattern("index")
            and _storage(self)
        )

    def look_ahead_items(self: Any) -> bool:
        return not self.everything and _paths(self)

    def _has_pattern(self: Any, kind: str) -> bool:
        if kind not in self._patterns:
            if self._tries > TRIES:
                return False
            self._tries += 1
            self._compile()
        return kind in self._patterns

    def _compile(self: Any) -> None:
        numbers: dict[Any, list[int]] = {}
        names = {
            "properties",
            "size",
            "chunks",
            "offsets",
            "sizes",
            "fqn",
            "index",
            "offset",
            "relative_path",
            "length",
        }
        for memo in (self.memo, self.young):
            for number, value in memo.items():
                if type(value) is Global or (type(value) is str and value in names):
                    known = numbers.setdefault(value, [])
                    if number not in known:
                        known.append(number)

        def get(key: Any) -> bytes:
            return _gets(numbers[key])

        try:
            some = get(SIZE) + b"(" + SOME_INTS + rb")\x85\x94R\x94"
            size = get(SIZE) + rb"(\)|" + SOME_INTS + rb")\x85\x94R\x94"
            chunk = get(CHUNK) + NEW + get("offsets") + b"%b" + get("sizes") + b"%b" + b"ub"
            flag = rb"[\x88\x89]"
            properties = ANY_GET + rb"\)\x81\x94\(" + ANY_GET * 2 + flag + ANY_GET + flag + rb"t\x94b"
            tensor = get(TENSOR) + NEW + get("properties") + b"(" + properties + b")"
            tensor += get("size") + size + get("chunks") + rb"\]\x94"
            tensor += b"(?:" + chunk.replace(b"%b", size) + b"aub)?"
            self._patterns.setdefault("tensor", re.compile(tensor, re.DOTALL))
            self._patterns.setdefault("tensors", re.compile(rb"\x8c(.)([\x20-\x7e]*)\x94" + tensor[:-1], re.DOTALL))
            self._patterns.setdefault("chunk", re.compile(chunk.replace(b"%b", some), re.DOTALL))
            bare = get(SIZE) + SOME_INTS + rb"\x85\x94R\x94"
            self._patterns.setdefault(
                "skip", re.compile(b"(?:" + chunk.replace(b"%b", bare) + b"){%d}" % SKIP, re.DOTALL)
            )
            entry = get(INDEX) + NEW + get("fqn") + TEXT + get("index") + b"(N|" + INT + b")"
            entry += b"(?:" + get("offset") + size + b")?ub"
            entry += get(STORAGE_INFO) + NEW + get("relative_path") + TEXT
            entry += get("offset") + b"(" + INT + b")" + get("length") + b"(" + INT + b")ub"
            self._patterns.setdefault("index", re.compile(entry, re.DOTALL))
        except KeyError:
            return  # not all of it has been seen yet

    def _sizes(self, data: bytes) -> tuple[int, ...] | None:
        value = self._cache.get(data)
        if value is None:
            value = _ints(data)
            if value is not None:
                if len(self._cache) >= CACHE:
                    self._cache.clear()
                self._cache[data] = value
        return value

    def _property(self: Any, data: bytes) -> Instance | None:
        """The TensorProperties that these opcodes make: the class, then dtype, layout, a flag, format, a flag."""
        known: Instance | None = self._properties.get(data)
        if known is None:
            values = []
            at = 0
            for skip in (4, 0, 1, 0):  # bytes after each reference: NEWOBJ and MARK; nothing; a flag
                width = 2 if data[at] == 0x68 else 5
                number = _number(data[at : at + width])
                values.append(self.memo.get(number) or self.young.get(number))
                at += width + skip
            kind, dtype, layout, form = values
            if type(kind) is not Global or kind.kind != "properties" or type(dtype) is not Global:
                return None
            known = Instance("properties", (dtype, layout, False, form, False))
            self._properties[data] = known
        return known


def _chunks(m: MetadataMachine, target: Any) -> bool:
    """Consecutive chunks into `target`, or past them when it keeps none."""
    begin = m.pos
    if m.stack:
        # Those that the machine made come first.
        m.add_elements(target, m.stack)
        m.stack.clear()
    buf, pos, count = m.buf, m.pos, m.count
    data = target.data
    if data is None:
        scanner = m._patterns["skip"].scanner(buf, pos)
        for match in iter(scanner.match, None):
            pos = match.end()
            count += 8 * SKIP  # object, state, and for both sizes tuple, arguments, Size
    scanner = m._patterns["chunk"].scanner(buf, pos)
    cached, sizes = m._cache.get, m._sizes
    for match in iter(scanner.match, None):
        if data is not None:
            first, second = match.groups()
            start = cached(first) or sizes(first)
            shape = cached(second) or sizes(second)
            if start is None or shape is None:
                break
            if len(start) != target.axes or len(shape) != target.axes:
                target.add(start, shape)  # the first, or damage
            else:
                data.extend(start)
                data.extend(shape)
        pos = match.end()
        count += 8
    m.pos, m.count = pos, count
    return pos != begin


def _tensor(m: MetadataMachine) -> bool:
    """A tensor with its only chunk, or up to its list of chunks. Its key is on the stack."""
    match = m._patterns["tensor"].match(m.buf, m.pos)
    if match is None:
        return False
    first, second, start, sizes = match.groups()
    properties = m._property(first)
    shape = m._sizes(second)
    key = m.stack[-1]
    if properties is None or shape is None or type(key) is not str:
        return False
    if len(m.stack) > 1:
        # Entries that the machine made come first.
        m.add_items(m.outer[-1][-1], m.stack[:-1])
        del m.stack[:-1]
    chunks = ChunkList(m.wanted(key))
    dtype = properties.state[0]
    # object, state, properties and their tuple, Size with its tuples, list
    count = 4 + (3 if shape else 2) + 1
    if start is None:
        m.stack.append(Instance("tensor"))
        m.stack.append({})
        m.outer.append(m.stack)
        m.stack = ["properties", properties, "size", shape, "chunks", chunks]
        m.pos, m.count = match.end(), m.count + count
        return True
    offsets, lengths = m._sizes(start), m._sizes(sizes)
    if offsets is None or lengths is None:
        return False
    chunks.add(offsets, lengths)
    m.stack.pop()
    m.add_tensor(key, dtype, shape, chunks)
    count += 2 + (3 if offsets else 2) + (3 if lengths else 2)
    m.pos, m.count = match.end(), m.count + count
    _tensors(m)
    return True


def _tensors(m: MetadataMachine) -> None:
    """Consecutive tensors of one chunk each, keys included."""
    pos, count = m.pos, m.count
    memo, tensors, shapes, keep = m.memo, m.meta.tensors, m.shapes, m.keep
    known, cached = m._properties.get, m._cache.get
    scanner = m._patterns["tensors"].scanner(m.buf, pos)
    for match in iter(scanner.match, None):
        length, text, first, second, third, fourth = match.groups()
        properties = known(first)
        shape, start, box = cached(second), cached(third), cached(fourth)
        # Anything seen for the first time, of another rank, or of no axes is left to the slower way.
        if length[0] != len(text) or properties is None or not shape or shape not in shapes or not start or not box:
            break
        if len(shape) != len(start) or len(shape) != len(box):
            break
        key = text.decode()
        if key in tensors:
            break
        memo[count] = key
        data = array("q", start + box) if keep is None or key in keep else array("q")
        tensors[key] = TensorEntry(properties.state[0].dtype, shape, data)
        count += 17  # as above, with the key
        pos = match.end()
    m.pos, m.count = pos, count


def _paths(m: MetadataMachine) -> bool:
    """Consecutive entries of planner_data whose keys are known texts or new ones."""
    if m.stack:
        # Entries that the machine made come first.
        m.add_items(m.outer[-1][-1], m.stack)
        m.stack.clear()
    begin = pos = m.pos
    count = m.count
    memo, young, paths, known = m.memo, m.young, m.meta.paths, m._prefixes
    if paths is None:
        return False
    for match in iter(PATH.scanner(m.buf, pos).match, None):  # type: ignore[attr-defined]
        get, length, text, before, last_length, last, code = match.groups()
        prefix = known.get(before)
        if prefix is None:
            gets = [_number(op) for op in re.findall(ANY_GET, before, re.DOTALL)]
            parts: list[Any] = [memo.get(part) or young.get(part) for part in gets]
            if any(type(part) is not str for part in parts):
                break
            prefix = known[before] = tuple(parts)
        if last_length[0] != len(last) or code[0] - 0x85 != len(prefix):
            break
        if get is not None:
            number = get[1] if len(get) == 2 else int.from_bytes(get[1:], "little")
            key = memo.get(number) or young.get(number)
            if type(key) is not str:
                break
        elif length[0] == len(text):
            key = text.decode()
            memo[count] = key
            count += 1
        else:
            break
        if m.with_paths:
            tail = last.decode()
            memo[count] = tail
            paths[key] = (*prefix, tail)
        else:
            memo[count] = last.decode()
        count += 2
        pos = match.end()
    m.pos, m.count = pos, count
    return pos != begin


def _storage(m: MetadataMachine) -> bool:
    """Consecutive entries of storage_data."""
    if m.stack:
        # Entries that the machine made come first.
        m.add_items(m.outer[-1][-1], m.stack)
        m.stack.clear()
    begin = pos = m.pos
    count = m.count
    memo, files, cached = m.memo, m.file_numbers, m._cache.get
    kept, numbers, order = m.kept, m.numbers, m.kept_order
    kept_numbers, kept_entries, dropped_numbers = m.kept_numbers, m.kept_entries, m.dropped_numbers
    extents = m.meta.extents
    known_files: dict[bytes, int] = {}
    scanner = m._patterns["index"].scanner(m.buf, pos)
    for match in iter(scanner.match, None):
        key_get, key_len, key, hint, start, file_get, file_len, file, offset_op, length_op = match.groups()
        if (key is not None and key_len[0] != len(key)) or (file is not None and file_len[0] != len(file)):
            break
        box = () if start is None else cached(start) or m._sizes(start)
        if box is None:
            break
        at = count + 2
        if key is None:
            name = memo.get(key_get[1] if len(key_get) == 2 else int.from_bytes(key_get[1:], "little"))
            entry = kept.get(name) if type(name) is str else m.recall_key(_number(key_get))
        else:
            which = numbers.get(key)
            if which is None:
                entry = None
                dropped_numbers.append(at)
            else:
                entry = order[which]
                kept_numbers.append(at)
                kept_entries.append(which)
            at += 1
        at += 2 if start is None else 4 if start == b")" else 5
        if file is None:
            number = known_files.get(file_get)
            if number is None:
                path = memo.get(_number(file_get)) or m.young.get(_number(file_get))
                number = files.get(path) if type(path) is str else None
                if number is None:
                    break
                known_files[file_get] = number
        else:
            path = file.decode()
            number = m.file_number(path)
            memo[at] = path
            at += 1
        offset, length = _int(offset_op), _int(length_op)
        if offset < 0 or length < 0 or offset + length > extents[number]:
            m.extent(number, offset, length)
        if entry is not None:
            if start is None:
                m.place(entry, None, None, number, offset, length)
            elif hint == b"K\0" and entry.places[0] < 0 and entry.boxes[: len(box)] == array("q", box):
                # The first chunk, most often the only one.
                entry.places[:3] = array("q", (number, offset, length))
            else:
                m.place(entry, None if hint == b"N" else _int(hint), box, number, offset, length)
        count = at
        pos = match.end()
    m.pos, m.count = pos, count
    return pos != begin
