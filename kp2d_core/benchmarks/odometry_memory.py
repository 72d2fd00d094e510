"""Memory of the odometry on a long path: python -m kp2d_core.benchmarks.odometry_memory.

The camera moves around a ring of 100 m again and again. The features come from a cloud of points.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from kp2d_core.odometry import Odometry, Settings
from kp2d_core.views.cloud import tube
from kp2d_core.views.worlds import ring_path, view_camera

SIZE = 640, 480
STEP = 0.15  # m from one frame to the next


def stored_bytes(thing: object) -> int:
    """Bytes of all arrays that an object refers to, directly or not, each counted once."""
    arrays: dict[int, int] = {}
    known: set[int] = set()
    waiting: list[Any] = [thing]
    while waiting:
        entry = waiting.pop()
        if id(entry) in known or isinstance(entry, type):
            continue
        known.add(id(entry))
        if isinstance(entry, np.ndarray):
            if isinstance(entry.base, np.ndarray):
                waiting.append(entry.base)
            else:
                arrays[id(entry)] = entry.nbytes
        elif not callable(entry):
            waiting += gc.get_referents(entry)
    return sum(arrays.values())


def resident() -> int:
    """Resident memory of this process in bytes (Linux)."""
    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--frames', type=int, default=18000, help='20 minutes at 15 Hz: 18000')
    parser.add_argument('--features', type=int, default=500, help='of a frame')
    parser.add_argument('--max-keyframes', type=int, default=Settings().max_keyframes)
    args = parser.parse_args()
    random = np.random.default_rng(0)
    camera = view_camera(SIZE)
    lap = ring_path(STEP, 100.0 - STEP)
    cloud = tube(lap, 60 * args.features, random, dimensions=64)
    odometry = Odometry(camera, Settings(max_keyframes=args.max_keyframes))
    rows = max(1, args.frames // 20)
    print(f'{"frames":>8}{"keyframes":>11}{"points":>9}{"arrays MB":>11}{"resident MB":>13}'
          f'{"ms/frame":>12}  state')  # fmt: skip
    spent = 0.0
    for number in range(args.frames):
        features = cloud.view(camera, lap[number % len(lap)], random, count=args.features)
        begun = time.process_time()
        estimate = odometry.update(features, number / 15)
        spent += time.process_time() - begun
        if (number + 1) % rows == 0:
            keyframes = sum(len(world.keyframes) for world in odometry.maps)
            points = sum(int(world.alive.sum()) for world in odometry.maps)
            print(f'{number + 1:>8}{keyframes:>11}{points:>9}{stored_bytes(odometry) / 1e6:>11.1f}'
                  f'{resident() / 1e6:>13.1f}{1e3 * spent / rows:>12.1f}  {estimate.state}',
                  flush=True)  # fmt: skip
            spent = 0.0


if __name__ == '__main__':
    main()
