"""JSON files of checkpoints: bounded, strict, and with an error that names the file."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from reshard.errors import Damaged

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON = 512 << 20


def read_json(path: Path) -> Any:
    """The value in a file. Raises Damaged when it is missing, too large, not JSON, or repeats a key."""
    try:
        if not path.is_file() and os.path.lexists(path):
            raise Damaged("json", str(path), "is not a regular file")
        if path.stat().st_size > MAX_JSON:
            raise Damaged("json", str(path), f"is larger than {MAX_JSON >> 20} MiB")
        return json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise Damaged("json", str(path), f"cannot be read ({error.strerror})") from error
    except RepeatedKey as error:
        raise Damaged("json", str(path), f"repeats the key {error.args[0]!r}") from error
    except (ValueError, RecursionError) as error:
        raise Damaged("json", str(path), "is not valid JSON") from error


class RepeatedKey(Exception):
    """A JSON object names a key twice, so that readers disagree on its value."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise RepeatedKey(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result
