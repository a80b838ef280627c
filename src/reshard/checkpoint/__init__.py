"""Checkpoint: what every layout opens to. A mapping from tensor name to lazy tensor, plus config and side files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.tensors.lazy import LazyTensor


@dataclass(frozen=True)
class Dropped:
    """A source item that will not be written, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, LazyTensor]):
    """An opened checkpoint.

    tensors:    model tensors by name, as stored (wrapper segments removed, not yet renamed to the hub's names)
    layout:     "hf", "dcp", ...: the key of the layout table
    path:       the directory (or first directory) it was opened from
    config:     the model's config.json as a dict, or None where there is none
    config_dir: where config.json was found, or None
    side_files: relative name -> absolute path of the files that travel with the weights
    left_out:   items of the source that are not model tensors (optimizer, scheduler, progress), with reasons
    training:   whether this is a training checkpoint (so that `--dtype auto` asks the config)
    family:     name of the model family that its config belongs to, or None
    trainer:    name of the trainer whose data matched, or None
    home:       the directory that a person would call the checkpoint (a trainer's step), where it is not `path`
    why:        one line on how the path given led to this checkpoint, or ""
    warnings:   things a person should know (stale files, ...)
    files:      every file whose bytes the tensors use -> its size, for integrity checks and fingerprints
    check:      reads what describes each stored item (not its bytes) and raises Damaged where it does not fit; opening
                skips this where it costs a read an item, and every verb that writes calls it before writing
    """

    tensors: dict[str, LazyTensor]
    layout: str
    path: str
    config: dict[str, Any] | None = None
    config_dir: str | None = None
    side_files: dict[str, str] = field(default_factory=dict)
    left_out: tuple[Dropped, ...] = ()
    training: bool = False
    family: str | None = None
    trainer: str | None = None
    home: str | None = None
    why: str = ""
    warnings: tuple[str, ...] = ()
    files: dict[str, int] = field(default_factory=dict)
    check: Callable[[], None] | None = None

    def __getitem__(self, name: str) -> LazyTensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def model_type(self) -> str | None:
        value = (self.config or {}).get("model_type")
        return value if isinstance(value, str) else None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors.values())
