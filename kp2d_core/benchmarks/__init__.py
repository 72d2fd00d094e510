"""Measurements of speed, each with `add_arguments(parser)` and `run(args) -> int`."""
