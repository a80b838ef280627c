"""Opening what a person names: a checkpoint, a run directory or several directories, with config and side files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.errors import Damaged, Refused, UsageError
from reshard.layouts import open_layout
from reshard.layouts.options import OpenOptions
from reshard.tensors.paths import leads_out

if TYPE_CHECKING:
    from reshard.checkpoint import Checkpoint


def open_checkpoint(source: str, *, config_from: str | None = None, model_key: str | None = None) -> Checkpoint:
    """Opens `source`: a checkpoint directory in any layout, a run directory, one file, or several directories joined by
    commas. Reads headers only. Raises UsageError (no such path), Refused (unsupported, unclear, unsafe) or Damaged."""
    from reshard.trainers import resolve_run

    paths = [Path(part) for part in source.split(",") if part] if not Path(source).exists() else [Path(source)]
    if not paths:
        raise UsageError("source", "SRC", "is empty", "name a checkpoint directory")
    for path in paths:
        if not path.exists():
            raise UsageError("source", str(path), "does not exist", "check the path")
    options = OpenOptions(config_from, model_key)
    run = resolve_run(paths[0]) if len(paths) == 1 else None
    if run is not None:
        paths = [Path(run.checkpoint_dir)]
    checkpoint = open_layout(paths, options)
    config_dirs = [*(str(path if path.is_dir() else path.parent) for path in paths), *(run.config_dirs if run else ())]
    tokenizer_dirs = [*(run.tokenizer_dirs if run else ())]
    checkpoint = _with_config(checkpoint, config_from, config_dirs, tokenizer_dirs)
    if run is not None:
        checkpoint = replace(checkpoint, trainer=run.trainer, home=run.step_dir, why=run.why)
    return checkpoint


def _with_config(
    checkpoint: Checkpoint, config_from: str | None, config_dirs: list[str], tokenizer_dirs: list[str]
) -> Checkpoint:
    """Attaches config.json and side files: `--config-from` first, then the checkpoint, then what its trainer names."""
    from reshard.families import find_family
    from reshard.hf.sidefiles import find_side_files, missing_code
    from reshard.layouts.json_files import read_json

    if config_from is not None and not Path(config_from).is_dir():
        raise UsageError("config", config_from, "is not a directory", "--config-from takes a model directory")
    dirs = [*([config_from] if config_from else []), *config_dirs]
    home = next((found for found in dirs if (Path(found) / "config.json").is_file()), None)
    odd = next((found for found in dirs if os.path.lexists(Path(found) / "config.json")), None)
    if odd is not None and odd != home:
        raise Damaged(
            "config", str(Path(odd) / "config.json"), "is not a regular file", "replace it by the file itself"
        )
    if home is None:
        if config_from is not None:
            raise UsageError("config", config_from, "holds no config.json", "--config-from takes a model directory")
        return checkpoint
    if leads_out(Path(home) / "config.json", Path(home)):
        raise Refused(
            "unsafe", str(Path(home) / "config.json"), "is a link out of the directory", "copy the file into it"
        )
    config = read_json(Path(home) / "config.json")
    if not isinstance(config, dict):
        raise Damaged("config", str(Path(home) / "config.json"), "is not a JSON object")
    order = list(dict.fromkeys([home, *([config_from] if config_from else []), *tokenizer_dirs]))
    side = find_side_files([path for path in order if Path(path).is_dir()])
    absent = missing_code(str(Path(home) / "config.json"))
    notes = [f"model code that config.json needs is absent: {', '.join(absent)}"] if absent else []
    family = find_family(config)
    return replace(
        checkpoint,
        config=config,
        config_dir=home,
        side_files=side,
        family=family.name if family else None,
        warnings=(*checkpoint.warnings, *notes),
    )
