"""How NumPy's matrix products share the processor with the model; read when NumPy is imported."""

from __future__ import annotations

import os

# Matching is a product of small matrices: two threads take two thirds of the time of one, and
# more gain nothing. But by default they go on spinning for milliseconds, on the cores that the
# next frame's inference needs, which then takes twice as long. Here, for 2^14 clock cycles.
ENVIRONMENT = {
    'OPENBLAS_NUM_THREADS': str(min(2, os.cpu_count() or 1)),
    'OPENBLAS_THREAD_TIMEOUT': '14',
}


def set_threads() -> None:
    """Unless the environment says otherwise."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
