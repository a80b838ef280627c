"""Would transformers load this checkpoint: its own answer, with the model and every tensor on the meta device.

transformers is handed names, dtypes and shapes, and runs the renames, the fusing of experts and the tying that it would
run on loading. No weight is read and none is allocated, so a model of any size is checked on any machine.
"""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from reshard.errors import Refused, UsageError
from reshard.tensors.dtypes import DTYPES
from reshard.transforms.names import strip_wrappers
from reshard.verbs.streaming import problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.checkpoint import Checkpoint
    from reshard.tensors.lazy import LazyTensor

INSTALL = "pip install 'reshard[hf]'"


def check_load(checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> list[dict[str, Any]]:
    """The problems that transformers would have in loading, as rows of verify's "problems"; none when it loads whole.

    Kinds: "load-missing" (the model wants it; tied aliases and what the class lets go do not count), "load-unexpected"
    (no place in the model, and not on the class's own list of what it ignores), "load-shape" (both shapes given; fused
    experts that lack a member show here, under the model's name) and "load-conversion".

    Raises UsageError without transformers, Refused without a config or where the class is not to be had: unknown to
    this transformers, or code of the checkpoint that only `trust_remote_code` lets run.
    """
    torch, transformers = _libraries()
    if checkpoint.config_dir is None:
        raise Refused("config", checkpoint.path, "has no config.json, so no model can be built", "--config-from DIR")
    with _quiet(transformers):
        config = _config(transformers, checkpoint.config_dir, trust_remote_code)
        model_class = _model_class(transformers, config, checkpoint.config_dir, trust_remote_code)
        state = {name: _meta(torch, tensor) for name, tensor in strip_wrappers(checkpoint.tensors).items()}
        try:
            # Sizes that differ are collected, not raised. Eager kernels: a config may name native code to fetch.
            _, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                attn_implementation="eager",
                experts_implementation="eager",
                local_files_only=True,
            )
        except Exception as error:  # what a model class raises is its own affair
            found = _info_of(error)
            if found is None:
                where = f"{checkpoint.config_dir} ({model_class.__name__})"
                raise Refused("load", where, f"transformers cannot build the model: {_first_line(error)}") from error
            info = found
    return _rows(info)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UsageError("transformers", "--load", f"needs {error.name or 'transformers'}", INSTALL) from error
    return torch, transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No report and no bar of transformers' own: its findings become rows here."""
    control = transformers.utils.logging
    logger, bar = logging.getLogger("transformers"), control.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    control.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bar:
            control.enable_progress_bar()


def _config(transformers: Any, directory: str, trust: bool) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trust, local_files_only=True)
    except Exception as error:
        if not trust and "trust_remote_code" in str(error):
            raise Refused(
                "remote-code", directory, "the model needs code that lies beside its config",
                "--trust-remote-code runs it; read it first",
            ) from error  # fmt: skip
        raise Refused("config", directory, f"transformers does not accept the config: {_first_line(error)}") from error


def _model_class(transformers: Any, config: Any, directory: str, trust: bool) -> Any:
    """The class that `architectures` names, from the checkpoint's own code only when trusted."""
    listed = getattr(config, "architectures", None)
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if not names:
        raise Refused("config", directory, "names no class under architectures, so nothing says what to load it as")
    name = names[0]
    if trust:
        references = [ref for ref in (getattr(config, "auto_map", None) or {}).values() if isinstance(ref, str)]
        reference = next((ref for ref in references if ref.rpartition(".")[2] == name), None)
        if reference is not None:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            try:
                return get_class_from_dynamic_module(reference, directory, local_files_only=True)
            except Exception as error:
                raise Refused("load", directory, f"its code does not load: {_first_line(error)}") from error
    found = getattr(transformers, name, None) if re.fullmatch(r"[A-Za-z]\w*", name) else None
    # The name comes from a file: only a model class will do.
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        remedy = "use a newer transformers" if trust else "use a newer transformers, or --trust-remote-code"
        raise Refused("load", directory, f"transformers {transformers.__version__} has no model class {name!r}", remedy)
    return found


def _meta(torch: Any, tensor: LazyTensor) -> Any:
    """The tensor's dtype and shape without its bytes. Packed dtypes as their bytes, which is how torch sees them."""
    row = DTYPES[tensor.dtype]
    if row.bits % 8:
        return torch.empty(tensor.storage[0], dtype=torch.uint8, device="meta")
    return torch.empty(tensor.shape, dtype=getattr(torch, row.torch), device="meta")


def _info_of(error: BaseException) -> dict[str, Any] | None:
    """What loading had found when it raised.

    A failed conversion raises without saying which one, after all findings were gathered; they lie in its frames.
    """
    trace = error.__traceback__
    found = None
    while trace is not None:
        info: Any = trace.tb_frame.f_locals.get("loading_info")
        if getattr(info, "conversion_errors", None):
            found = info.to_dict() | {"conversion_errors": dict(info.conversion_errors)}
        trace = trace.tb_next
    return found


def _rows(info: dict[str, Any]) -> list[dict[str, Any]]:
    failed = info.get("conversion_errors", {})
    rows = [
        problem("load-missing", "is missing: transformers would leave it at random values", tensor=name)
        for name in sorted(set(info["missing_keys"]) - set(failed))
    ]
    rows += [
        problem("load-unexpected", "has no place in the model and would be ignored", tensor=name)
        for name in sorted(info["unexpected_keys"])
    ]
    rows += [
        problem("load-shape", f"is {list(stored)} as stored where the model has {list(wanted)}", tensor=name)
        for name, stored, wanted in sorted(info["mismatched_keys"])
    ]
    rows += [
        problem("load-conversion", f"cannot be made of what is stored: {_last_line(text)}", tensor=name)
        for name, text in sorted(failed.items())
    ]
    return rows + [problem("load", str(text)) for text in info.get("error_msgs", [])]


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _last_line(text: object) -> str:
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "unknown")[:300]
