"""What may happen to tensors between a source and an output: rename, rearrange, drop, cast. Mappings in and out."""
