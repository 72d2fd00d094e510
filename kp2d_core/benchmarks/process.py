"""Measure a contestant in its own process: seconds to the first result, and peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT = 300  # seconds


def start_up(
    model: str, runtime: str, precision: str, threads: int, size: tuple[int, int], top_k: int
) -> dict[str, float]:
    """Measure peak memory and the seconds to the first result, with an empty and a full cache."""
    request = [model, runtime, precision, threads, *size, top_k]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, 'XDG_CACHE_HOME': cache}
        package = str(Path(__file__).parents[2])
        environment['PYTHONPATH'] = os.pathsep.join(
            filter(None, [package, os.environ.get('PYTHONPATH')])
        )
        answers = []
        for _ in range(2):
            result = subprocess.run(
                [sys.executable, '-m', __name__, json.dumps(request)],
                env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False,
            )  # fmt: skip
            if result.returncode:
                reason = (result.stderr.strip().splitlines() or ['no reason given'])[-1]
                raise ValueError(f'{model} on {runtime}, {precision}, did not start: {reason}')
            answers.append(json.loads(result.stdout))
    cold, warm = answers
    return {
        'first_result_cold_s': cold['seconds'],
        'first_result_warm_s': warm['seconds'],
        'peak_memory_mb': warm['peak_mb'],
    }


def main() -> None:
    model, runtime, precision, threads, width, height, top_k = json.loads(sys.argv[1])
    start = time.perf_counter()
    import numpy as np

    from kp2d_core.benchmarks.contestants import source_to_time
    from kp2d_core.runtimes import open_source_with

    opened = open_source_with(runtime, source_to_time(model, precision), threads)
    image = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
    np.asarray(opened.run(image, top_k).descriptors)
    seconds = time.perf_counter() - start
    for _ in range(3):
        np.asarray(opened.run(image, top_k).descriptors)
    print(json.dumps({'seconds': seconds, 'peak_mb': peak_memory()}))


def peak_memory() -> float:
    """Peak memory in MB. Not from getrusage, whose peak a process inherits from its parent."""
    status = Path('/proc/self/status').read_text()
    line = next(line for line in status.splitlines() if line.startswith('VmHWM'))
    return int(line.split()[1]) / 1024


if __name__ == '__main__':
    main()
