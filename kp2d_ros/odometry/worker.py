"""The thread that runs the odometry, with a short queue."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kp2d_ros.odometry.follower import Source
from kp2d_ros.pipeline import THREAD_NAME


@dataclass(frozen=True)
class Job:
    """The clouds of one frame, with the calibrations known when they arrived."""

    clouds: list[Any]
    infos: list[Any]
    arrived: float  # time.monotonic()
    source: Source  # of the descriptors


class FollowerThread:
    """Processes jobs in order. A full queue drops its oldest job."""

    def __init__(
        self,
        work: Callable[[Job], None],
        count: Callable[[str], None],
        problem: Callable[[str, str], None],
        longest: int,
    ) -> None:
        """Call problem(kind, sentence) for each frame that is 'damaged' or has 'failed'."""
        self._work = work
        self._count = count
        self._problem = problem
        self._longest = longest
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        # Same name as the thread of the keypoint node: run_node looks for it at exit.
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> int:
        """Queue a job; return how many older jobs were dropped for it."""
        dropped = 0
        with self._changed:
            self._jobs.append(job)
            while len(self._jobs) > self._longest:
                self._jobs.popleft()
                self._count('dropped')
                dropped += 1
            self._changed.notify()
        return dropped

    def stop(self, timeout: float) -> None:
        """Stop after the current frame."""
        with self._changed:
            self._closed = True
            for _ in self._jobs:
                self._count('dropped')
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._jobs)
                if self._closed:
                    return
                job = self._jobs.popleft()
            try:
                self._work(job)
            except ValueError as error:
                self._count('damaged')
                self._problem('damaged', str(error))
            except Exception as error:  # continue with the next frame
                self._count('failed')
                trace = traceback.format_exc()
                self._problem('failed', f'{type(error).__name__}: {error}\n{trace}')
