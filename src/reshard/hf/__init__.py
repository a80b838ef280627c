"""The Hugging Face side of an output: its config and the files that travel with the weights."""
