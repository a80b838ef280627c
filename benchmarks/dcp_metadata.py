"""Time and memory of reading a large DCP `.metadata`, beside `pickle.load`, which is torch's own way.

    python benchmarks/dcp_metadata.py [--chunks 4000000] [--reference 400000]

The file is what torch writes for a model with Adam on 256 ranks: for each parameter a tensor and two moments, each
cut into 256 chunks, with storage entries gathered rank by rank (so that texts and sizes are fresh objects for each
rank). It is written opcode by opcode, since making it with torch would take tens of gigabytes; `--check` compares a
small one with what Python's pickler makes of the same objects."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RANKS = 256
ROWS = 28  # of each chunk
COLUMNS = 8192
METADATA = "torch.distributed.checkpoint.metadata"


class Writer:
    """Emits a pickle of protocol 4 in frames of 64 KiB, as Python's pickler does."""

    def __init__(self, out) -> None:
        self.out = out
        self.frame: list[bytes] = []
        self.size = 0
        self.count = 0
        self.known: dict[object, int] = {}
        out.write(b"\x80\x04")

    def raw(self, data: bytes, memos: int = 0) -> None:
        self.frame.append(data)
        self.size += len(data)
        self.count += memos
        if self.size >= 64 << 10:
            self.flush()

    def flush(self) -> None:
        self.out.write(b"\x95" + struct.pack("<Q", self.size))
        self.out.writelines(self.frame)
        self.frame, self.size = [], 0

    def get(self, number: int) -> bytes:
        return b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number)

    def text(self, value: str, *, fresh: bool = False) -> None:
        if not fresh and value in self.known:
            self.raw(self.get(self.known[value]))
            return
        data = value.encode()
        if not fresh:
            self.known[value] = self.count
        self.raw(b"\x8c" + bytes([len(data)]) + data + b"\x94", 1)

    def name(self, module: str, name: str) -> None:
        key = (module, name)
        if key in self.known:
            self.raw(self.get(self.known[key]))
            return
        # The pickler finds a module's name again by identity; class names are texts of their own.
        self.text(module, fresh=module == "torch" and name == "Size")
        self.text(name, fresh=True)
        self.known[key] = self.count
        self.raw(b"\x93\x94", 1)


def number(value: int) -> bytes:
    if value < 256:
        return b"K" + bytes([value])
    if value < 65536:
        return b"M" + struct.pack("<H", value)
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def keys(chunks: int) -> list[tuple[str, tuple]]:
    count = max(1, chunks // RANKS // 3)
    names = [f"model.layers.{i // 64}.mlp.experts.{i % 64}.gate_proj.weight" for i in range(count)]
    return [
        *((f"app.model.{name}", ("app", "model", name)) for name in names),
        *(
            (f"app.optimizers.state.{name}.{moment}", ("app", "optimizers", "state", name, moment))
            for name in names
            for moment in ("exp_avg", "exp_avg_sq")
        ),
    ]


def build(path: Path, chunks: int) -> None:
    entries = keys(chunks)
    with path.open("wb") as out:
        w = Writer(out)

        def new(module: str, name: str) -> None:
            w.name(module, name)
            w.raw(b")\x81\x94", 1)
            w.raw(b"}\x94(", 1)

        def size(rows: int, columns: int) -> None:
            w.name("torch", "Size")
            w.raw(number(rows) + number(columns) + b"\x86\x94\x85\x94R\x94", 3)

        def batches(items):
            for begin in range(0, len(items), 1000):
                yield items[begin : begin + 1000]

        new(METADATA, "Metadata")
        w.text("state_dict_metadata")
        w.raw(b"}\x94", 1)
        for batch in batches(entries):
            w.raw(b"(")
            for key, _ in batch:
                w.text(key)
                new(METADATA, "TensorStorageMetadata")
                w.text("properties")
                w.name(METADATA, "TensorProperties")
                w.raw(b")\x81\x94(", 1)
                w.name("torch", "bfloat16")
                if "layout" in w.known:
                    w.raw(w.get(w.known["layout"]))
                else:
                    w.name("torch.serialization", "_get_layout")
                    w.text("torch.strided", fresh=True)
                    w.raw(b"\x85\x94", 1)
                    w.known["layout"] = w.count
                    w.raw(b"R\x94", 1)
                w.raw(b"\x89")
                if "format" in w.known:
                    w.raw(w.get(w.known["format"]))
                else:
                    w.name(METADATA, "_MEM_FORMAT_ENCODING")
                    w.raw(b"K\0\x85\x94", 1)
                    w.known["format"] = w.count
                    w.raw(b"R\x94", 1)
                w.raw(b"\x89t\x94b", 1)
                w.text("size")
                size(ROWS * RANKS, COLUMNS)
                w.text("chunks")
                w.raw(b"]\x94(", 1)
                for rank in range(RANKS):
                    new(METADATA, "ChunkStorageMetadata")
                    w.text("offsets")
                    size(ROWS * rank, 0)
                    w.text("sizes")
                    size(ROWS, COLUMNS)
                    w.raw(b"ub")
                w.raw(b"eub")
            w.raw(b"u")
        w.text("planner_data")
        w.raw(b"}\x94", 1)
        for batch in batches(entries):
            w.raw(b"(")
            for key, parts in batch:
                w.text(key)
                if len(parts) > 3:
                    w.raw(b"(")
                for part in parts:
                    w.text(part)
                w.raw((b"\x87" if len(parts) == 3 else b"t") + b"\x94", 1)
            w.raw(b"u")
        w.text("storage_data")
        w.raw(b"}\x94", 1)
        item = 2 * ROWS * COLUMNS + 1600
        pairs = [(rank, i) for rank in range(RANKS) for i in range(len(entries))]
        for batch in batches(pairs):
            w.raw(b"(")
            for rank, i in batch:
                new(METADATA, "MetadataIndex")
                w.text("fqn")
                w.text(entries[i][0], fresh=True)
                w.text("index")
                w.raw(number(rank))
                w.text("offset")
                size(ROWS * rank, 0)
                w.raw(b"ub")
                new("torch.distributed.checkpoint.filesystem", "_StorageInfo")
                w.text("relative_path")
                w.text(f"__{rank}_0.distcp")
                w.text("offset")
                w.raw(number(item * i))
                w.text("length")
                w.raw(number(item) + b"ub")
            w.raw(b"u")
        w.text("storage_meta")
        w.raw(b"N")
        w.text("version")
        w.text("1.0.0")
        w.raw(b"ub.")
        w.flush()


def check(path: Path) -> None:
    """The file loads in torch, and pickling what it loads gives the same opcodes (frames apart)."""
    build(path, 3 * RANKS * 4)
    data = path.read_bytes()

    def opcodes(pickled: bytes) -> list:
        return [(op.name, arg) for op, arg, _ in pickletools.genops(pickled) if op.name != "FRAME"]

    ours, theirs = opcodes(data), opcodes(pickle.dumps(pickle.loads(data), protocol=4))
    for at, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise SystemExit(f"opcode {at}: {ours[at - 3 : at + 3]} where pickle writes {theirs[at - 3 : at + 3]}")
    print(f"{len(ours)} opcodes, as pickle writes them" if len(ours) == len(theirs) else "lengths differ")


# Run in a process of its own: prints seconds and peak memory.
MEASURE = """
import json, sys, time
def peak():  # of this process alone; getrusage begins with its parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
{setup}
before = peak()
begin = time.perf_counter()
{work}
seconds = time.perf_counter() - begin
print(json.dumps({{"seconds": seconds, "before": before, "peak": peak()}}))
"""
OURS = """
listing, full = scan(sys.argv[1])
kept = [key for key, path in listing.paths.items() if path[:-1] == ("app", "model")]
meta = listing if full else load(sys.argv[1], kept)
assert all(meta.tensors[key].gap() is None and -1 not in meta.tensors[key].file_numbers() for key in kept)
"""


def measure(setup: str, work: str, path: Path) -> dict:
    code = MEASURE.format(setup=setup, work=work)
    result = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=4_000_000)
    parser.add_argument("--reference", type=int, default=400_000, help="chunks for pickle.load")
    parser.add_argument("--check", action="store_true", help="only compare the writer with pickle")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".metadata"
        if options.check:
            check(path)
            return
        rows = []
        for chunks, ways in ((options.reference, ("pickle.load", "reshard")), (options.chunks, ("reshard",))):
            begin = time.perf_counter()
            build(path, chunks)
            built = time.perf_counter() - begin
            for way in ways:
                if way == "reshard":
                    found = measure("from reshard.layouts.dcp.metadata import load, scan", OURS, path)
                else:
                    found = measure(
                        "import pickle, torch.distributed.checkpoint", "x = pickle.load(open(sys.argv[1], 'rb'))", path
                    )
                rows.append((way, len(keys(chunks)) * RANKS, path.stat().st_size, found, built))
        print(f"{'':12} {'chunks':>10} {'file MB':>8} {'seconds':>8} {'us/chunk':>9} {'RSS before':>11} {'peak MB':>8}")
        for way, chunks, size, found, _ in rows:
            print(
                f"{way:12} {chunks:10,} {size / 1e6:8.0f} {found['seconds']:8.1f}"
                f" {found['seconds'] / chunks * 1e6:9.2f}"
                f" {found['before'] / 1024:11.0f} {found['peak'] / 1024:8.0f}"
            )


if __name__ == "__main__":
    os.nice(5)
    main()
