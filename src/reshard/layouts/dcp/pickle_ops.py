"""The less frequent opcodes of the pickle machine: one function each, by opcode. The frequent ones are in its loop."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.layouts.dcp.pickle_vm import Machine

MAX_INT_BYTES = 255


def _set_items(m: Machine) -> None:
    items = m.pop_mark()
    m.add_items(m.stack[-1], items)


def _set_item(m: Machine) -> None:
    value = m.stack.pop()
    key = m.stack.pop()
    m.add_items(m.stack[-1], [key, value])


def _append(m: Machine) -> None:
    value = m.stack.pop()
    m.add_elements(m.stack[-1], [value])


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    m.add_elements(m.stack[-1], items)


def _frame(m: Machine) -> None:
    if int.from_bytes(m.take(8), "little") > m.size - m.base - m.pos:
        raise ValueError("a frame beyond the end")


def _proto(m: Machine) -> None:
    if not 2 <= m.take(1)[0] <= 5:
        raise ValueError("an unknown protocol")


def _stack_global(m: Machine) -> None:
    name = m.stack.pop()
    m.stack[-1] = m.named(m.stack[-1], name)


def _persistent(m: Machine) -> None:
    m.stack[-1] = m.persistent(m.stack[-1])


def _number(width: int, most: int) -> Callable[[Machine], None]:
    """LONG1 and LONG4: a length of `width` bytes, then a two's complement number."""

    def step(m: Machine) -> None:
        length = int.from_bytes(m.take(width), "little", signed=width == 4)
        m.stack.append(int.from_bytes(m.take(max(length, 0), most), "little", signed=True))

    return step


def _text(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.take(int.from_bytes(m.take(width), "little")).decode())


def _bytes(width: int) -> Callable[[Machine], None]:
    return lambda m: m.stack.append(m.take(int.from_bytes(m.take(width), "little")))


def _get(width: int, m: Machine) -> None:
    m.put(int.from_bytes(m.take(width), "little"))


def _pop(m: Machine) -> None:
    m.stack.pop()


def _pop_mark(m: Machine) -> None:
    m.pop_mark()


STEPS: dict[int, Callable[[Machine], None]] = {
    ord("}"): lambda m: m.stack.append(m.new_dict()),
    ord("]"): lambda m: m.stack.append(m.new_list()),
    ord("u"): _set_items,
    ord("s"): _set_item,
    ord("a"): _append,
    ord("e"): _appends,
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("q"): lambda m: _get(1, m),
    ord("r"): lambda m: _get(4, m),
    ord("G"): lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    0x8A: _number(1, MAX_INT_BYTES),
    0x8B: _number(4, MAX_INT_BYTES),
    ord("X"): _text(4),
    0x8D: _text(8),
    ord("C"): _bytes(1),
    ord("B"): _bytes(4),
    0x8E: _bytes(8),
    ord("c"): lambda m: m.stack.append(m.named(m.line(), m.line())),
    0x93: _stack_global,
    0x95: _frame,
    0x80: _proto,
    ord("Q"): _persistent,
    ord("0"): _pop,
    ord("1"): _pop_mark,
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
}
