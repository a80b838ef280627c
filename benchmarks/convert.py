"""DCP to Hugging Face against the copy yardstick, and against torch's loader with huggingface_hub's save.

    python benchmarks/convert.py [--gigabytes 3] [--rounds 5] [--work DIR] [--peer]

Prints the tables that benchmarks/README.md holds. Needs about three times the size in free disk.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common import compare, copy, files_below, plain_cp, reshard, run, size_of, table

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--peer", action="store_true", help="also time torch's loader with huggingface_hub's save")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="reshard-bench-", dir=args.work))
    try:
        for stored, wanted in (("bfloat16", "bfloat16"), ("float32", "bfloat16")):
            print(case(work, stored, wanted, args), flush=True)
            print()
    finally:
        shutil.rmtree(work)


def case(work: Path, stored: str, wanted: str, args: argparse.Namespace) -> str:
    source, config = work / "dcp", work / "dcp-config"
    shutil.rmtree(source, ignore_errors=True)
    make = [
        sys.executable,
        str(HERE / "make_dcp.py"),
        str(source),
        "--gigabytes",
        str(args.gigabytes),
        "--dtype",
        stored,
    ]
    subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
    inputs = files_below(source)
    total = size_of(source)
    out_bytes = total if stored == wanted else total // 2
    command = [str(source), "--config-from", str(config), "--dtype", wanted, "--quiet"]
    contenders = {
        "copy": lambda out: copy(inputs, out, out_bytes),
        "cp -r, no sync": lambda out: plain_cp(source, out),
        "reshard convert": lambda out: run(reshard("convert", command[0], str(out), *command[1:])),
    }
    if args.peer:
        peer = [sys.executable, str(HERE / "peer_dcp_to_hf.py"), str(source)]
        contenders["torch load, huggingface_hub save"] = lambda out: run([*peer, str(out), wanted])
    results = compare(contenders, work, args.rounds)
    return table(f"DCP {stored} to Hugging Face {wanted}, {total / 1e9:.1f} GB in, 2 ranks' files", results)


if __name__ == "__main__":
    main()
