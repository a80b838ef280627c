"""From what a command does to what a person, a program and the shell see: text or JSON, one line, an exit status."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

import typer

from reshard.errors import ReshardError, UsageError

INTERRUPTED = 130
# Only these leave something behind that a second run can take up.
RESUMABLE = ("convert",)


@dataclass(frozen=True)
class Flags:
    json: bool = False
    quiet: bool = False
    debug: bool = False


@dataclass(frozen=True)
class Answer:
    """What a command has to say.

    document: makes what --json prints
    lines:    makes what people read
    status:   exit status
    error:    with a status other than 0, the line for stderr
    """

    document: Callable[[], Mapping[str, Any]]
    lines: Callable[[], Iterable[str]]
    status: int = 0
    error: str = ""


@dataclass(frozen=True)
class _Fault:
    """An exception as it is told: the line without the program's name, the exit status, and the error for --json."""

    line: str
    status: int
    error: ReshardError


def first_rank() -> bool:
    """Whether this process speaks for the job. Under torchrun only one does."""
    return os.environ.get("RANK", "0") in ("", "0")


def catch_signals() -> None:
    """SIGTERM, which torchrun and schedulers send, ends a command as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run(
    command: str, flags: Flags, body: Callable[[], Answer], *, source: str = "", out: str | None = None
) -> NoReturn:
    """Runs a command's body, says what came of it, and ends with typer.Exit."""
    stdout = _claim_stdout() if flags.json else sys.stdout
    speaks = first_rank()
    try:
        answer = body()
        if flags.json and speaks:
            _write(stdout, _dumps(answer.document()) + "\n")
        elif speaks and not flags.quiet:
            _write(stdout, "".join(f"{printable(line)}\n" for line in answer.lines()))
        if answer.status:
            _complain(answer.error)
        raise typer.Exit(answer.status)
    except typer.Exit:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _deaf_while_reporting()
        fault = _fault(error, command)
        if flags.debug:
            _show_traceback(error)
        if fault.line:
            _complain(fault.line)
        if flags.json and speaks:
            _write(stdout, _dumps(_refusal(command, source, out, fault.error)) + "\n", may_fail=True)
        _hear_again()
        raise typer.Exit(fault.status) from None


def report_usage(command: str, flags: Flags, message: str) -> int:
    """Wrong usage found before a command ran: one line, and under --json a document. Returns the exit status."""
    where = "reshard" if command == "reshard" else f"reshard {command}"
    error = UsageError("usage", "", " ".join(message.split()).rstrip("."), f"see {where} --help")
    if first_rank():
        _complain(error.line())
        if flags.json:
            _write(sys.stdout, _dumps(_refusal(command, "", None, error)) + "\n", may_fail=True)
    return error.exit_status


def printable(text: str) -> str:
    """Text without control characters: names come from untrusted files."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _fault(error: BaseException, command: str) -> _Fault:
    if isinstance(error, ReshardError):
        return _Fault(error.line(), error.exit_status, error)
    if isinstance(error, KeyboardInterrupt):
        remedy = "run again with --resume to continue" if command in RESUMABLE else ""
        told = ReshardError("interrupted", "", "interrupted", remedy)
        return _Fault(told.line(), INTERRUPTED, told)
    if isinstance(error, BrokenPipeError):
        told = ReshardError("pipe", "", "the reader of the output went away")
        return _Fault("", told.exit_status, told)
    if isinstance(error, OSError) and error.strerror:
        told = ReshardError("system", str(error.filename or ""), error.strerror)
        return _Fault(told.line(), told.exit_status, told)
    detail = f"{type(error).__name__}: {error}".rstrip(": ")
    told = ReshardError("internal", "internal error", detail, "--debug shows the traceback")
    return _Fault(told.line(), told.exit_status, told)


def _refusal(command: str, source: str, out: str | None, error: ReshardError) -> Mapping[str, Any]:
    """The JSON document of a command that ended in an error."""
    if command == "convert":
        from reshard.verbs.convert import refusal

        return refusal(command, source, out, error)
    status = "failed" if error.exit_status in (1, 4) else "refused"
    return {"command": command, "status": status, "source": source, "error": error.to_json()}


def _claim_stdout() -> TextIO:
    """The real stdout, for the document alone; what libraries print goes to stderr from now on."""
    try:
        sys.stdout.flush()
        mine = os.dup(1)
        os.dup2(2, 1)
    except (AttributeError, OSError):  # a stream that the caller closed
        return open(os.devnull, "w", encoding="utf-8")
    return open(mine, "w", encoding="utf-8")


def _write(stream: TextIO, text: str, *, may_fail: bool = False) -> None:
    """Writes and flushes. A reader that went away (`| head`) is no fault of ours: the work is done."""
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    except OSError:
        # What is still buffered would fail again, with a traceback, when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not may_fail:
            raise


def _complain(line: str) -> None:
    if sys.stderr is not None:
        _write(sys.stderr, f"reshard: {printable(line)}\n", may_fail=True)


def _dumps(document: Mapping[str, Any]) -> str:
    try:
        return json.dumps(document, indent=2, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)


def _deaf_while_reporting() -> None:
    # torchrun follows Ctrl-C with SIGTERM: the second signal must not break the one line in two.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _hear_again() -> None:
    # From here on another Ctrl-C ends the process at once, in silence.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
