"""The engine: a plan of output files known byte by byte, run as segments, journalled, and published atomically.

It knows nothing of models: only contents (bytes that can be produced from any offset), files, and segments.
"""
