"""Side files: what travels with the weights (tokenizer, templates, processors, model code) and what must not."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Weights, foreign exports, optimizer state and logs.
NEVER_SUFFIX = frozenset(
    ".safetensors .bin .pt .pth .gguf .h5 .msgpack .onnx .onnx_data .tflite .ot .mlmodel .distcp .metadata .ckpt .npz .pkl .lock .tmp "
    ".uncommitted .staged .log".split()
)
NEVER_NAME = re.compile(
    r"^(config\.json|reshard\.json|.*\.safetensors\.index\.json|pytorch_model\.bin\.index\.json|trainer_state\.json"
    r"|training_args\..*|optimizer.*|hf_quant_config\.json|quantization_config\.json|adapter_config\.json)$"
)
NEVER_DIRECTORY = re.compile(
    r"^([._].*|checkpoint-\d+|global_step_?\d+|step[_-]\d+|original|consolidated|metal|weights.*|optimizer.*|dataloader.*"
    r"|resume_adapter|wandb|runs|logs|rng.*|extra_state)$"
)
# Training state that is named like a side file but belongs to a run.
CARRIED = ("router_balancing_biases.pt", "training_provenance.json")
MAX_DEPTH = 4
MAX_FILES = 10_000


def find_side_files(dirs: Sequence[str]) -> dict[str, str]:
    """Relative name -> path of everything that travels, from several directories; the first to have a name gives it.

    Refused when a file is a link out of its directory (the blobs of a hub cache excepted).
    """
    found: dict[str, str] = {}
    for number, home in enumerate(map(Path, dirs)):
        for path in _walk(home, 0):
            name = path.relative_to(home).as_posix()
            # Only the directory of the config gives its model code and nested folders; others give tokenizer files.
            if number and ("/" in name or path.suffix == ".py"):
                continue
            if name not in found:
                _check_link(path, home)
                found[name] = str(path)
            if len(found) > MAX_FILES:
                raise Refused(
                    "side-files", str(home), f"holds more than {MAX_FILES} files", "--config-from a clean directory"
                )
    return dict(sorted(found.items()))


def _walk(directory: Path, depth: int) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        if path.is_dir():
            if depth < MAX_DEPTH and not NEVER_DIRECTORY.match(path.name) and not _is_checkpoint(path):
                yield from _walk(path, depth + 1)
        elif path.is_file() and travels(path.name):
            yield path


def travels(name: str) -> bool:
    """Whether a file of this name is a side file."""
    if name in CARRIED:
        return True
    return not (name.startswith(".") or Path(name).suffix in NEVER_SUFFIX or NEVER_NAME.match(name))


def _is_checkpoint(path: Path) -> bool:
    """A directory with weights of its own is not part of this model."""
    return any(p.suffix in (".safetensors", ".distcp", ".metadata") or p.name == ".metadata" for p in path.iterdir())


def _check_link(path: Path, home: Path) -> None:
    real, inside = Path(os.path.realpath(path)), Path(os.path.realpath(home))
    blobs = inside.parent.parent / "blobs" if inside.parent.name == "snapshots" else None
    if not real.is_relative_to(inside) and not (blobs is not None and real.is_relative_to(blobs)):
        raise Refused("unsafe", str(path), "is a link out of the directory", "copy the file into it")


def missing_code(config_path: str) -> list[str]:
    """Modules that a config's `auto_map` needs, directly or through relative imports, and that are absent beside it.

    Nothing is imported: sources are parsed. `repo--module.Class` names code of another repository and is not looked for.
    """
    home = Path(config_path).parent
    try:
        config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    todo = [f"{module}.py" for module in sorted(_modules(config.get("auto_map")))]
    seen: set[str] = set()
    absent = []
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        path = home / name
        if not path.is_file():
            absent.append(name)
            continue
        todo += _relative_imports(path, home)
    return sorted(absent)


def _modules(auto_map: object) -> set[str]:
    if not isinstance(auto_map, dict):
        return set()
    names = [item for value in auto_map.values() for item in (value if isinstance(value, list) else [value])]
    return {name.split(".")[0] for name in names if isinstance(name, str) and "--" not in name and "/" not in name}


def _relative_imports(path: Path, home: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    here = path.parent.relative_to(home)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            for module in modules:
                target = here / Path(*module.split("."))
                package = home / target / "__init__.py"
                found.append((target / "__init__.py" if package.is_file() else target.with_suffix(".py")).as_posix())
    return found
