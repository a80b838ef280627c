"""The errors that a person sees: what is wrong, where, and what to do. One class for each exit status."""

from __future__ import annotations


class ReshardError(Exception):
    """A fault with a place and a remedy.

    kind:   a short stable word for programs, such as "coverage" or "header"
    where:  the file, tensor or flag concerned
    detail: what is wrong, in one clause
    remedy: what the reader can do about it, or "" when nothing can be done
    """

    exit_status = 1

    def __init__(self, kind: str, where: str, detail: str, remedy: str = "") -> None:
        self.kind = kind
        self.where = str(where)
        self.detail = detail
        self.remedy = remedy
        super().__init__(self.line())

    def line(self) -> str:
        """The one line for stderr."""
        text = f"{self.where}: {self.detail}" if self.where else self.detail
        text = f"{text}; {self.remedy}" if self.remedy else text
        # Names come from untrusted files: no line breaks, no terminal codes.
        return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))

    def to_json(self) -> dict[str, str]:
        return {"kind": self.kind, "where": self.where, "detail": self.detail, "remedy": self.remedy}

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.kind, self.where, self.detail, self.remedy)


class UsageError(ReshardError):
    """The command or call is wrong (exit 2)."""

    exit_status = 2


class Refused(ReshardError):
    """The input is sound, but the job is unsupported, ambiguous or unsafe (exit 3)."""

    exit_status = 3


class Damaged(ReshardError):
    """The input is damaged or an integrity check failed (exit 4)."""

    exit_status = 4
