"""Verbs: what a person asks for. Each opens a checkpoint, builds a plan or walks it, and reports a plain dict."""
