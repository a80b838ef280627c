"""Peak memory of the command line: one 6 GB tensor, 50,000 small tensors, 100 MB and 3 GB of ordinary ones.

    python benchmarks/memory.py [--work DIR]

Each case is converted from torch DCP to Hugging Face (same dtype and fp32 to bf16) with `--max-memory 1GiB`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from common import reshard, run

from reshard.tensors.header import build_header

CASES: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "100 MB, 25 tensors": {f"t.{i}": ("F32", (1000, 1000)) for i in range(25)},
    "3 GB, 30 tensors": {f"t.{i}": ("F32", (5000, 5000)) for i in range(30)},
    "one 6 GB tensor": {"t.0": ("F32", (1_500_000, 1000))},
    "50,000 small tensors": {f"model.layers.{i // 500}.t.{i % 500}": ("F32", (40, 50)) for i in range(50_000)},
}


def write_source(home: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A sparse file of zeros: what is measured is memory, not the disk."""
    home.mkdir()
    header, size = build_header(tensors, {"format": "pt"})
    with (home / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    (home / "config.json").write_text(json.dumps({"model_type": "unknown", "dtype": "float32"}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    print("| input | HF to DCP | DCP to HF | DCP to HF, bf16 |\n|---|---|---|---|", flush=True)
    for name, tensors in CASES.items():
        work = Path(tempfile.mkdtemp(prefix="reshard-bench-", dir=args.work))
        try:
            write_source(work / "hf", tensors)
            limit = ["--max-memory", "1GiB", "--quiet"]
            runs = [run(reshard("convert", str(work / "hf"), str(work / "dcp"), "--to", "dcp", *limit))]
            shutil.rmtree(work / "hf")
            for dtype in ("keep", "bfloat16"):
                runs.append(run(reshard("convert", str(work / "dcp"), str(work / "out"), "--dtype", dtype, *limit)))
                shutil.rmtree(work / "out")
            cells = " | ".join(f"{r.peak / (1 << 20):.0f} MiB, {r.seconds:.1f} s" for r in runs)
            print(f"| {name} | {cells} |", flush=True)
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
