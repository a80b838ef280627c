"""Today's usual way, as a yardstick: torch loads the whole DCP checkpoint, huggingface_hub splits and saves it."""

from __future__ import annotations

import os
import sys

import torch
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main() -> None:
    source, out, dtype = sys.argv[1:]
    os.makedirs(out)
    whole = os.path.join(out, "whole.pt")
    dcp_to_torch_save(source, whole)
    state = torch.load(whole, weights_only=True)["model"]
    os.remove(whole)
    state = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    save_torch_state_dict(state, out, max_shard_size="5GB")
    os.sync()


if __name__ == "__main__":
    main()
