"""Side files: what travels with the weights (tokenizer, templates, processors, model code) and what must not."""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged, Refused
from reshard.tensors.paths import leads_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Weights, foreign exports, optimizer state, logs and staging leftovers.
NEVER_SUFFIX = frozenset(
    (
        ".safetensors .bin .pt .pth .gguf .h5 .msgpack .onnx .onnx_data .tflite .ot .mlmodel .distcp .metadata .ckpt "
        ".npz .pkl .lock .tmp .uncommitted .staged .log"
    ).split()
)
NEVER_NAME = re.compile(
    r"^(reshard\.json|.*\.safetensors\.index\.json|pytorch_model\.bin\.index\.json|trainer_state\.json"
    r"|training_args\..*|optimizer.*|adapter_config\.json|resume_adapter\.json)$"
)
NEVER_DIRECTORY = re.compile(
    r"^([._].*|checkpoint-\d+|global_step_?\d+|step[_-]\d+|original|consolidated|metal|weights.*|optimizer.*|dataloader.*"
    r"|resume_adapter|wandb|runs|logs|rng.*|extra_state)$"
)
# Training state that is named like a side file but belongs to the model.
CARRIED = ("router_balancing_biases.pt", "training_provenance.json")
# Files that may name model code, each in its `auto_map`.
CODE_NAMERS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
PIPELINE = "modules.json"  # of sentence-transformers: a list of the pipeline's modules, each with a folder of its own
MAX_DEPTH = 16
MAX_FILES = 10_000


def find_side_files(dirs: Sequence[str]) -> dict[str, str]:
    """Relative name -> path of everything that travels, from several directories; the first to have a name gives it.

    `config.json` at the top is not among them. Nested folders and model code come from the first directory only.
    Refused when a file is a link out of its directory (the blobs of a hub cache excepted).
    """
    found: dict[str, str] = {}
    for number, home in enumerate(map(Path, dirs)):
        for path in _walk(home, home, _pipeline_folders(home)):
            name = path.relative_to(home).as_posix()
            if name == "config.json" or (number and ("/" in name or path.suffix == ".py")):
                continue
            if name not in found:
                _check_link(path, home)
                found[name] = str(path)
            if len(found) > MAX_FILES:
                detail = f"holds more than {MAX_FILES} files"
                raise Refused("side-files", str(home), detail, "--config-from a clean directory")
    return dict(sorted(found.items()))


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise Damaged("side-files", str(directory), f"cannot be listed ({error.strerror})") from error


def _walk(directory: Path, home: Path, whole: frozenset[str]) -> Iterator[Path]:
    relative = directory.relative_to(home)
    inside_whole = bool(relative.parts) and relative.parts[0] in whole
    for path in _entries(directory):
        if path.is_dir():
            if path.is_symlink() and Path(os.path.realpath(directory)).is_relative_to(os.path.realpath(path)):
                continue  # a circle
            below = relative / path.name
            if len(below.parts) > MAX_DEPTH:
                raise Refused(
                    "side-files", str(path), f"lies more than {MAX_DEPTH} folders deep", "--config-from a clean one"
                )
            named = inside_whole or str(below) in whole
            if named or not (NEVER_DIRECTORY.match(path.name) or _is_checkpoint(path)):
                _check_link(path, home)
                yield from _walk(path, home, whole)
        elif inside_whole or travels(path.name):
            if not path.is_file():
                raise Damaged(
                    "side-files", str(path), "is not a regular file", "replace it by the file itself, or remove it"
                )
            yield path


def travels(name: str) -> bool:
    """Whether a file of this name is a side file."""
    if name in CARRIED:
        return True
    return not (name.startswith(".") or Path(name).suffix in NEVER_SUFFIX or NEVER_NAME.match(name))


def _pipeline_folders(home: Path) -> frozenset[str]:
    """Folders of a sentence-transformers pipeline, which travel whole: some hold small weights of their own."""
    rows = _json(home / PIPELINE)
    paths = [row.get("path") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return frozenset(path for path in paths if isinstance(path, str) and re.fullmatch(r"\w[\w.-]*", path))


def _is_checkpoint(path: Path) -> bool:
    """A directory with weights of its own is not part of this model."""
    return any(p.suffix in (".safetensors", ".distcp", ".metadata") or p.name == ".metadata" for p in _entries(path))


def _check_link(path: Path, home: Path) -> None:
    if leads_out(path, home):
        raise Refused("unsafe", str(path), "is a link out of the directory", "copy what it points to into it")


def _json(path: Path) -> Any:
    """The content of a small JSON file, or None where there is none."""
    try:
        if path.stat().st_size > 64 << 20:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def missing_code(config_path: str) -> list[str]:
    """Modules that the `auto_map` of a config, tokenizer or processor needs, directly or through relative imports, and
    that are absent beside it.

    Nothing is imported: sources are parsed. `repo--module.Class` names code of another repository: not looked for.
    """
    home = Path(config_path).parent
    todo: list[str] = []
    for name in CODE_NAMERS:
        table = _json(home / name)
        todo += _modules(table.get("auto_map")) if isinstance(table, dict) else []
    seen: set[str] = set()
    absent = set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        path = home / name
        if path.is_file():
            todo += _relative_imports(path, home)
        else:
            absent.add(name)
    return sorted(absent)


def _modules(auto_map: object) -> list[str]:
    """Files that an `auto_map` names: {"AutoModel": "module.Class"}, or lists of such with gaps."""
    if not isinstance(auto_map, dict):
        return []
    names = [item for value in auto_map.values() for item in (value if isinstance(value, list) else [value])]
    # Not a word: a path, or `repo--module`, which is another repository's.
    found = {name.split(".")[0] for name in names if isinstance(name, str)}
    return sorted(f"{module}.py" for module in found if re.fullmatch(r"\w+", module))


def _relative_imports(path: Path, home: Path) -> list[str]:
    """Files that a module imports by `from .x import y` or `from . import x`, within the directory."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = path.parent.relative_to(home).parts
            if node.level - 1 > len(parts):
                continue  # above the directory: of another package
            base = Path(*parts[: len(parts) - node.level + 1])
            for module in [node.module] if node.module else [alias.name for alias in node.names]:
                target = base.joinpath(*module.split("."))
                package = home / target / "__init__.py"
                if package.is_file():
                    found.append((target / "__init__.py").as_posix())
                elif node.module or (home / f"{target}.py").is_file() or not (home / base / "__init__.py").is_file():
                    found.append(f"{target.as_posix()}.py")
    return found
