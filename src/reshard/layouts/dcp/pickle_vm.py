"""A machine for pickles of protocols 2 to 5 that calls nothing and reads a file through a window.

It executes the opcodes that CPython's pickler writes. Classes and functions are looked up in a table of our own (see
`light`); objects are `Instance`s. Text opcodes of protocols 0 and 1, extension codes and out-of-band buffers are
damage: no pickler emits them here. Memory is bounded by what the file really holds, whatever its lengths say: a
length is compared with the rest of the file before anything is allocated, and the stack, the nesting and the memo
have limits.

The opcodes are those of CPython's pickletools.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, Refused, ReshardError
from reshard.layouts.dcp.light import Constant, Global, Instance
from reshard.layouts.dcp.pickle_ops import STEPS

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW = 1 << 20
# An opcode with its argument, and an entry that is recognised by looking ahead, fit into this, or are read apart.
MARGIN = 64 << 10
MAX_TEXT = 4 << 20
MAX_DEPTH = 500
MAX_STACK = 4 << 20
# Most objects that are remembered. A remembered object costs around 100 bytes.
MAX_HELD = 16 << 20


class Unrecorded(Exception):
    """The pickle refers back to something that was passed over. Reading it again with everything recorded helps."""


class Machine:
    """Runs one pickle.

    data:    all its bytes, or None to read `fd` (`size` bytes) through a window
    everything: whether all that is memoised is recorded; else a subclass may pass over entries
    sweep:   whether `forget` drops what is memoised but no longer needed
    """

    def __init__(
        self,
        where: str,
        resolve: Callable[[str, str], Global | Constant],
        data: bytes | None = None,
        fd: int = -1,
        size: int = 0,
        everything: bool = True,
        sweep: bool = False,
    ) -> None:
        self.where = where
        self.resolve = resolve
        self.fd = fd
        self.size = len(data) if data is not None else size
        self.everything = everything
        self.sweep = sweep
        self.buf = data or b""
        self.base = 0  # position of buf[0] in the file
        self.pos = 0
        self.limit = sys.maxsize if data is not None else 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []  # stacks below the marks
        self.memo: dict[int, Any] = {}
        self.young: dict[int, Any] = {} if sweep else self.memo
        self.count = 0  # entries ever memoised
        self.held = 0
        self.watched: Any = None  # a dict of which every entry begins with a look ahead
        self.globals: dict[tuple[str, str], Global | Constant] = {}

    # What a subclass may change ---------------------------------------------------------------------------------

    def new_dict(self) -> Any:
        return {}

    def new_list(self) -> Any:
        return []

    def add_items(self, target: Any, items: list[Any]) -> None:
        """SETITEM and SETITEMS."""
        if type(target) is not dict or len(items) % 2:
            raise ValueError("items for something other than a dict")
        for key in items[::2]:
            # Other keys do not occur, and hashing a deeply nested tuple would overflow the C stack.
            if type(key) is not str and type(key) is not int:
                raise ValueError("a key that is no text")
        self._hold(len(items))
        target.update(zip(items[::2], items[1::2], strict=True))

    def add_elements(self, target: Any, items: list[Any]) -> None:
        """APPEND and APPENDS."""
        if type(target) is not list:
            raise ValueError("elements for something other than a list")
        self._hold(len(items))
        target.extend(items)

    def look_ahead(self, found: Global, number: int) -> bool:
        """Called at a GET of a class with a hook, with self.pos at the opcode. True when it has moved on itself."""
        return False

    def look_ahead_items(self) -> bool:
        """Called where an entry of `watched` begins with a GET, likewise."""
        return False

    def persistent(self, key: Any) -> Any:
        raise ValueError("a persistent id")

    # The machine ------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """The object. Raises Refused for a name off the table, Damaged for anything that is not a sound pickle."""
        try:
            return self._run()
        except ReshardError as error:
            if not error.where:
                raise type(error)(error.kind, self.where, error.detail, error.remedy) from error
            raise
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            struct.error,
        ) as error:
            what = "is empty" if not self.size else "is damaged or cut short"
            raise Damaged("pickle", self.where, what, "the save did not complete, or the file was altered") from error

    def forget(self) -> None:
        """Drops from the memo what is no longer needed: all but names, texts and constants."""
        if not self.sweep:
            return
        memo = self.memo
        for number, value in self.young.items():
            kind = type(value)
            if kind is str or kind is Global or kind is Constant or (kind is Instance and value.kind == "properties"):
                memo[number] = value
        self.young.clear()
        if len(memo) > MAX_HELD:
            raise self._too_large()

    def _hold(self, count: int) -> None:
        self.held += count
        if self.held > MAX_HELD:
            raise self._too_large()

    def _too_large(self) -> Refused:
        return Refused("pickle", self.where, "holds more objects than are read at once")

    def _refill(self, need: int = MARGIN) -> None:
        """Moves the window so that `need` bytes from self.pos on are in it, or the rest of the file."""
        if self.fd < 0:
            return
        rest = self.buf[self.pos :]
        self.base += self.pos
        self.pos = 0
        want = min(max(WINDOW, need), self.size - self.base) - len(rest)
        parts = [rest]
        at = self.base + len(rest)
        while want > 0:
            part = os.pread(self.fd, want, at)
            if not part:
                break
            parts.append(part)
            at += len(part)
            want -= len(part)
        self.buf = b"".join(parts)
        self.limit = sys.maxsize if at >= self.size or want > 0 else max(len(self.buf) - MARGIN, 1)
        if len(self.memo) + len(self.young) > 2 * MAX_HELD:
            raise self._too_large()
        if len(self.stack) + sum(map(len, self.outer)) > MAX_STACK:
            raise ValueError("the stack is too large")

    def take(self, length: int, most: int = MAX_TEXT) -> bytes:
        """The next `length` bytes. A length beyond the file is damage, found before anything is allocated."""
        if length > most or length > self.size - self.base - self.pos:
            raise ValueError("a length beyond the end")
        if length > len(self.buf) - self.pos:
            self._refill(length + MARGIN)
        data = self.buf[self.pos : self.pos + length]
        if len(data) != length:
            raise ValueError("the end comes early")
        self.pos += length
        return data

    def line(self) -> str:
        end = self.buf.find(b"\n", self.pos, self.pos + 1024)
        if end < 0:
            raise ValueError("no end of line")
        data = self.buf[self.pos : end]
        self.pos = end + 1
        return data.decode()

    def named(self, module: Any, name: Any) -> Global | Constant:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = self.resolve(module, name)
        return found

    def _recall(self, number: int) -> Any:
        value = self.young.get(number)
        if value is None:
            if self.everything or number >= self.count:
                raise KeyError(number)
            raise Unrecorded
        return value

    def put(self, number: int) -> None:
        if number == self.count:
            self.count += 1
        elif number > self.count:
            if not self.everything:
                raise Unrecorded
            self.count += number not in self.memo
        self.young[number] = self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """The items above the last mark; the stack below it becomes current."""
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def _run(self) -> Any:
        # One loop with the frequent opcodes in it, and the state in locals: this runs a few times for each tensor.
        if not self.size:
            raise ValueError("empty")
        buf, pos, limit = self.buf, self.pos, self.limit
        stack, memo, young, count = self.stack, self.memo, self.young, self.count
        items: list[Any] | None = None  # the stack of entries of what is watched
        while True:
            if pos >= limit:
                self.pos, self.stack = pos, stack
                self._refill()
                buf, pos, limit = self.buf, self.pos, self.limit
            op = buf[pos]
            pos += 1
            if op == 0x94:  # MEMOIZE
                young[count] = stack[-1]
                count += 1
            elif op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                if op == 0x68:
                    number = buf[pos]
                    after = pos + 1
                else:
                    number = int.from_bytes(buf[pos : pos + 4], "little")
                    after = pos + 4
                value = memo.get(number)
                if value is None:
                    self.count = count
                    value = self._recall(number)
                if value.__class__ is Global and value.hook:
                    self.pos, self.stack, self.count = pos - 1, stack, count
                    if self.look_ahead(value, number):
                        pos, stack, count = self.pos, self.stack, self.count
                        continue
                elif stack is items and (not stack or stack[-1].__class__ is tuple):  # the last value
                    self.pos, self.stack, self.count = pos - 1, stack, count
                    if self.look_ahead_items():
                        pos, stack, count = self.pos, self.stack, self.count
                        continue
                pos = after
                stack.append(value)
            elif op == 0x8C:  # SHORT_BINUNICODE
                end = pos + 1 + buf[pos]
                text = buf[pos + 1 : end].decode()
                pos = end
                stack.append(text)
            elif op == 0x4B:  # BININT1
                stack.append(buf[pos])
                pos += 1
            elif op == 0x28:  # MARK
                if len(self.outer) > MAX_DEPTH:
                    raise ValueError("nested too deeply")
                self.outer.append(stack)
                below = stack[-1] if stack else None
                stack = self.stack = []
                if below is not None and below is self.watched:
                    items = stack
            elif op == 0x72 and int.from_bytes(buf[pos : pos + 4], "little") == count:  # LONG_BINPUT, in order
                young[count] = stack[-1]
                count += 1
                pos += 4
            elif op == 0x58 and buf[pos + 1] < 16 and not buf[pos + 2] and not buf[pos + 3]:  # BINUNICODE, short
                end = pos + 4 + buf[pos] + 256 * buf[pos + 1]
                text = buf[pos + 4 : end].decode()
                pos = end
                stack.append(text)
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif op == 0x87:  # TUPLE3
                last = stack.pop()
                middle = stack.pop()
                stack[-1] = (stack[-1], middle, last)
            elif op == 0x4D:  # BININT2
                stack.append(int.from_bytes(buf[pos : pos + 2], "little"))
                pos += 2
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(buf[pos : pos + 4], "little", signed=True))
                pos += 4
            elif op == 0x52:  # REDUCE
                args = stack.pop()
                function = stack[-1]
                if type(function) is not Global or function.reduce is None or type(args) is not tuple:
                    raise ValueError("a call of something that is not callable")
                stack[-1] = function.reduce(args)
            elif op == 0x81:  # NEWOBJ
                args = stack.pop()
                found = stack[-1]
                if type(found) is not Global or not found.new or args != ():
                    raise ValueError("an object of something that is no class")
                stack[-1] = Instance(found.kind)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                target = stack[-1]
                if type(target) is not Instance or target.state is not None or type(state) not in (dict, tuple):
                    raise ValueError("a state for something that has none")
                target.state = state
            elif op == 0x74:  # TUPLE
                values = tuple(stack)
                stack = self.stack = self.outer.pop()
                stack.append(values)
            elif op == 0x2E:  # STOP
                self.pos, self.stack, self.count = pos, stack, count
                if len(stack) != 1 or self.outer or pos > len(buf):
                    raise ValueError("objects are left over")
                return stack[0]
            else:
                step = STEPS.get(op)
                if step is None:
                    raise ValueError(f"opcode {op}")
                self.pos, self.stack, self.count = pos, stack, count
                step(self)
                buf, pos, limit, stack, count = self.buf, self.pos, self.limit, self.stack, self.count
