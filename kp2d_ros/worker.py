"""The thread that does the work, so that the node's executor never waits for the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kp2d_core.camera import Camera
from kp2d_ros.bridge import Decoder
from kp2d_ros.diagnostics import Sample, Statistics
from kp2d_ros.pipeline import Frame, Pipeline, Result
from kp2d_ros.settings import Settings

THREAD_NAME = 'kp2d worker'

Item = TypeVar('Item')


class Mailbox(Generic[Item]):
    """One slot between two threads: the newest item wins, what it replaces is dropped."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._item: Item | None = None
        self._closed = False

    def put(self, item: Item) -> bool:
        """Leave an item; True if an older one, not yet taken, had to go."""
        with self._changed:
            replaced = self._item is not None
            self._item = item
            self._changed.notify()
            return replaced

    def take(self) -> Item | None:
        """Wait for an item and take it; None once the box is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._item is not None)
            item, self._item = self._item, None
            return None if self._closed else item

    def close(self) -> bool:
        """Wake whoever waits; True if an item was left that nobody will take."""
        with self._changed:
            self._closed = True
            left = self._item is not None
            self._item = None
            self._changed.notify_all()
            return left


@dataclass(frozen=True)
class Arrival:
    """An image message, and what else was known when it arrived."""

    message: Any
    arrived: float  # time.monotonic()
    camera: Camera | None


class Worker:
    """Decodes, processes and publishes the newest frame; drops those it has no time for."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        decode: Decoder,
        settings: Callable[[], Settings],
        publish: Callable[[Result, Any], None],
        problem: Callable[[str, str], None],
        trace: Callable[[str], object],
        statistics: Statistics,
    ) -> None:
        """problem(kind, sentence) hears of every frame that is 'damaged' or has 'failed'.

        trace(sentence) hears how long each step took of each frame that was processed.
        """
        self.pipeline = pipeline
        self._decode = decode
        self._settings = settings
        self._publish = publish
        self._problem = problem
        self._trace = trace
        self._statistics = statistics
        self._mailbox: Mailbox[Arrival] = Mailbox()
        self._reset = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def submit(self, arrival: Arrival) -> None:
        if self._mailbox.put(arrival):
            self._statistics.count('dropped')

    def reset(self) -> None:
        """Tracks begin anew with the next frame."""
        self._reset.set()

    def stop(self, timeout: float) -> bool:
        """End after the frame in work; whether it did within `timeout` seconds."""
        if self._mailbox.close():
            self._statistics.count('dropped')
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (arrival := self._mailbox.take()) is not None:
            try:
                self._work(arrival)
            except ValueError as error:
                self._count('damaged', str(error))
            except Exception as error:  # whatever a runtime throws, the next frame has its chance
                self._count('failed', f'{type(error).__name__}: {error}')

    def _work(self, arrival: Arrival) -> None:
        message = arrival.message
        stamp = message.header.stamp
        if self._reset.is_set():
            self._reset.clear()
            self.pipeline.reset('asked for')
        began = time.monotonic()
        frame = Frame(
            image=self._decode(message),
            stamp=stamp.sec * 10**9 + stamp.nanosec,
            frame_id=message.header.frame_id,
            camera=arrival.camera,
        )
        decoded = time.monotonic()
        result = self.pipeline.process(frame, self._settings())
        processed = time.monotonic()
        self._publish(result, message.header)
        now = time.monotonic()
        self._trace(
            f'frame {frame.stamp}: waited {1e3 * (began - arrival.arrived):.2f}, '
            f'decoded {1e3 * (decoded - began):.2f}, '
            f'detected {1e3 * result.inference_time:.2f}, '
            f'tracked {1e3 * (result.total_time - result.inference_time):.2f}, '
            f'published {1e3 * (now - processed):.2f} ms'
        )
        matches = result.tracks.matches if result.tracks is not None else None
        self._statistics.add(
            Sample(
                finished=now,
                latency=now - arrival.arrived,
                inference=result.inference_time,
                keypoints=len(result.features),
                matches=0 if matches is None else len(matches),
                inliers=0 if matches is None else int(matches.inliers.sum()),
            )
        )

    def _count(self, kind: str, sentence: str) -> None:
        self._statistics.count(kind)
        self._problem(kind, sentence)
