"""How OpenMP's threads wait for each other, which is read when torch is imported."""

from __future__ import annotations

import os

# About 30 us: longer than between two layers, shorter than others on the machine notice.
SPINS = '20000'


def set_waiting() -> None:
    """Spin for a moment, then sleep; unless the environment says otherwise.

    Threads that spin on take the time of whatever else runs: two trainings on two cores were ten
    times slower. Threads that sleep at once wake too late: a step then takes a tenth longer.
    """
    if 'OMP_WAIT_POLICY' not in os.environ:
        os.environ['OMP_WAIT_POLICY'] = 'PASSIVE'
        os.environ.setdefault('GOMP_SPINCOUNT', SPINS)
