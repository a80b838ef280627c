"""The load check: transformers' own loader, given every tensor's shape and no tensor's bytes.

The model is built on the meta device and loaded with a state dict of meta tensors, so that renaming, fusing and tying
are transformers' own, and the memory is that of importing it.
"""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.errors import Refused, ReshardError
from reshard.families import find_family
from reshard.tensors.dtypes import DTYPES
from reshard.tensors.torch_extra import require_torch
from reshard.transforms.experts import convert_experts
from reshard.transforms.names import strip_wrappers
from reshard.verbs.streaming import problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.checkpoint import Checkpoint

Problem = dict[str, Any]


def check_load(checkpoint: Checkpoint, trust_remote_code: bool) -> tuple[list[Problem], list[str]]:
    """(problems, notes) of loading a checkpoint's names, shapes and dtypes into the model that its config describes.

    A training checkpoint is seen under its family's Hub names, as `convert` would write it. Raises Refused where
    transformers is missing, has no class for the model, or would have to run the model's own code without leave.
    """
    torch = require_torch("the load check")
    if checkpoint.config is None or checkpoint.config_dir is None:
        raise Refused(
            "config", checkpoint.path, "has no config.json to build the model from", "--config-from DIR names one"
        )
    tensors = strip_wrappers(checkpoint.tensors)
    if checkpoint.training:
        tensors = convert_experts(tensors, find_family(checkpoint.config), checkpoint.config, "hub", training=True)[0]
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        row = DTYPES[tensor.dtype]
        kind = getattr(torch, row.torch, None) if row.torch else None
        if kind is None:
            raise Refused(
                "dtype", name, f"is {tensor.dtype}, which torch cannot hold", "the load check does not cover it"
            )
        shape = (*tensor.shape[:-1], tensor.shape[-1] // 2) if tensor.dtype == "F4" else tensor.shape
        state[name] = torch.empty(shape, dtype=kind, device="meta")
    with _quiet():
        config, kind = _model_class(checkpoint, trust_remote_code)
        with _captured() as seen:
            failure = _load(kind, config, state)
    return _problems(seen, failure), [f"loaded by transformers as {kind.__name__}, on the meta device"]


def _model_class(checkpoint: Checkpoint, trust_remote_code: bool) -> tuple[Any, Any]:
    """(config object, model class): the class that the config's architectures name."""
    try:
        import transformers
    except ImportError as error:
        raise Refused(
            "extra", "transformers", "is needed for the load check", "pip install 'reshard[torch,hf]'"
        ) from error
    home, raw = str(checkpoint.config_dir), checkpoint.config or {}
    named = next((name for name in raw.get("architectures") or [] if isinstance(name, str)), None)
    own = getattr(transformers, named, None) if named else None
    auto_map: dict[str, Any] = raw["auto_map"] if isinstance(raw.get("auto_map"), dict) else {}
    remote = own is None and bool(auto_map)
    if remote and not trust_remote_code:
        raise Refused(
            "code", home, "loading this model runs code that comes with it", "--trust-remote-code allows that"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(home, trust_remote_code=remote, local_files_only=True)
        if own is not None:
            return config, own
        if remote:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            reference = next((v for v in auto_map.values() if isinstance(v, str) and v.endswith(f".{named}")), None)
            reference = reference or next(
                v for k, v in auto_map.items() if k.startswith("AutoModel") and isinstance(v, str)
            )
            return config, get_class_from_dynamic_module(reference, home, local_files_only=True)
        if named is not None:
            raise Refused(
                "load", home, f"transformers {transformers.__version__} has no {named}", "install a version that has it"
            )
        return config, transformers.MODEL_MAPPING[type(config)]
    except ReshardError:
        raise
    except StopIteration:
        raise Refused("load", home, "auto_map names no model class") from None
    except Exception as error:
        # Whatever a library, or the model's own code, makes of a config that it cannot use.
        raise Refused("load", home, f"transformers cannot use this config ({_short(error)})") from error


def _load(kind: Any, config: Any, state: dict[str, Any]) -> Exception | None:
    """Loads, and returns what the loader raised, if anything."""
    try:
        kind.from_pretrained(
            None, config=config, state_dict=state, device_map="meta", ignore_mismatched_sizes=True, dtype="auto"
        )
    except Exception as error:
        return error
    return None


@contextmanager
def _captured() -> Iterator[dict[str, Any]]:
    """Keeps the loader's report: what it returns does not tell of failed conversions, and is lost when it raises."""
    from importlib import import_module

    module: Any = import_module("transformers.modeling_utils")

    seen: dict[str, Any] = {}

    def report(*args: Any, loading_info: Any = None, **kwargs: Any) -> None:
        if loading_info is None:
            loading_info = next((arg for arg in args if hasattr(arg, "missing_keys")), None)
        seen["info"] = loading_info

    original = module.log_state_dict_report
    module.log_state_dict_report = report
    try:
        yield seen
    finally:
        module.log_state_dict_report = original


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, warnings or network while the loader runs."""
    from importlib import import_module

    bars: Any = import_module("transformers.utils.logging")
    logger = logging.getLogger("transformers")
    level, offline = logger.level, os.environ.get("HF_HUB_OFFLINE")
    shown = bars.is_progress_bar_enabled()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logger.setLevel(logging.CRITICAL)
    bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()
        if offline is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = offline


def _problems(seen: dict[str, Any], failure: Exception | None) -> list[Problem]:
    info = seen.get("info")
    found: list[Problem] = []
    if info is not None:
        found += [
            problem("missing", "the model has it, the checkpoint does not", tensor=name)
            for name in sorted(info.missing_keys)
        ]
        found += [
            problem("unexpected", "the checkpoint has it, the model does not", tensor=name)
            for name in sorted(info.unexpected_keys)
        ]
        found += [
            problem("shape", f"is {list(stored)} in the checkpoint, {list(wanted)} in the model", tensor=name)
            for name, stored, wanted in sorted(info.mismatched_keys)
        ]
        found += [
            problem("shape", f"cannot be put together: {_last_line(text)}", tensor=name)
            for name, text in sorted(info.conversion_errors.items())
        ]
    if failure is not None and not found:
        found.append(problem("load", f"transformers fails to load it ({_short(failure)})"))
    return found


def _last_line(text: str) -> str:
    """What the loader says of a failed conversion: a traceback, the message, and where it happened."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith("Error")]
    return (told or lines or [""])[-1]


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
