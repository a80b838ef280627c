"""The processes of one job: this one alone, or the ranks that torchrun started.

Ranks share the output's file system and exchange only small JSON values, through the key-value store that torchrun
already runs for its workers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from reshard.errors import ReshardError, UsageError
from reshard.tensors.torch_extra import require_torch

# A rank that says nothing for this long is taken for lost.
TIMEOUT = timedelta(minutes=60)


@dataclass
class Ranks:
    """This process's `rank` among `world`. `exchange` is collective: every rank calls it in the same order."""

    rank: int = 0
    world: int = 1
    _store: Any = None
    _round: int = field(default=0)

    def exchange(self, value: Any) -> list[Any]:
        """The JSON-able value of every rank, by rank."""
        if self.world == 1:
            return [value]
        self._round += 1
        try:
            self._store.set(f"reshard/{self._round}/{self.rank}", json.dumps(value))
            return [json.loads(self._store.get(f"reshard/{self._round}/{rank}")) for rank in range(self.world)]
        except (RuntimeError, ValueError) as error:
            raise ReshardError("ranks", f"rank {self.rank}", "lost contact with the other ranks") from error

    def agree(self, error: ReshardError | None) -> None:
        """Raises on every rank when any rank has an error: the first rank's, with its own class."""
        verdicts = self.exchange(None if error is None else {"class": type(error).__name__, **error.to_json()})
        if error is not None:
            raise error
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                kinds: list[type[ReshardError]] = [ReshardError, *ReshardError.__subclasses__()]
                kind = next((kind for kind in kinds if kind.__name__ == verdict["class"]), ReshardError)
                raise kind(
                    verdict["kind"], verdict["where"], f"{verdict['detail']} (on rank {rank})", verdict["remedy"]
                )

    @property
    def first(self) -> bool:
        return self.rank == 0


def current() -> Ranks:
    """The ranks of this job, from torchrun's environment; one process when there is none."""
    world = int(os.environ.get("WORLD_SIZE", "1") or "1")
    if world == 1:
        return Ranks()
    rank = int(os.environ.get("RANK", "-1"))
    if not 0 <= rank < world or "MASTER_ADDR" not in os.environ:
        raise UsageError(
            "ranks", "WORLD_SIZE", f"is {world}, but RANK and MASTER_ADDR do not go with it", "use torchrun"
        )
    require_torch("running on several ranks")
    from torch.distributed.rendezvous import rendezvous

    store, rank, world = next(rendezvous("env://", rank, world, timeout=TIMEOUT))
    return Ranks(rank, world, store)
