"""Checkpoints written by hand for tests, with the safetensors library or byte by byte, never with reshard."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INDEX = "model.safetensors.index.json"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "tie_word_embeddings": False,
}


def write_hf(
    home: Path, *files: Mapping[str, Any], config: Mapping[str, Any] | None = None, total: int | None = None
) -> Path:
    """A directory of one file, or of several with an index; config None leaves config.json away."""
    home.mkdir(parents=True, exist_ok=True)
    count = len(files)
    names = (
        [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    for name, tensors in zip(names, files, strict=True):
        save_file(dict(tensors), home / name, metadata={"format": "pt"})
    if count > 1:
        size = sum(array.nbytes for tensors in files for array in tensors.values()) if total is None else total
        weight_map = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
        (home / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    if config is not None:
        (home / "config.json").write_text(json.dumps(config))
    return home


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """(the JSON of a file's header, where its data begins)."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), 8 + length


def flip(path: Path, at: int) -> None:
    """Changes one byte of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 1]))


def flip_in_tensor(path: Path, name: str, at: int = 0) -> None:
    header, start = header_of(path)
    flip(path, start + header[name]["data_offsets"][0] + at)


def raw_file(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file of a given header (bytes, or a value for JSON) whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
