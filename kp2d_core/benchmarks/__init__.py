"""Measurements of `kp2d bench`, each with `add_arguments(parser)` and `run(args) -> int`."""
