"""Tensors at rest: dtypes, safetensors headers, boxes, and lazy tensors that know which file bytes they are."""
