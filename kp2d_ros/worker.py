"""The thread that does the work, so that the node's executor never waits for the model."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kp2d_core.camera import Camera
from kp2d_core.images import Image
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
        """Wait for an item and take it; None while the box is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._item is not None)
            if self._closed:
                return None
            item, self._item = self._item, None
            return item

    def close(self, closed: bool = True) -> None:
        """Wake whoever waits. It can be opened again."""
        with self._changed:
            self._closed = closed
            self._changed.notify_all()

    def empty(self) -> bool:
        """Throw away what nobody will take; True if there was something."""
        with self._changed:
            left = self._item is not None
            self._item = None
            return left


@dataclass(frozen=True)
class Arrival:
    """An image message, and what else was known when it arrived."""

    message: Any
    arrived: float  # time.monotonic()
    camera: Camera | None
    mask: Image | None = None
    baseline: float = 0.0

    @property
    def stamp(self) -> int:
        """Nanoseconds."""
        stamp = self.message.header.stamp
        return int(stamp.sec * 10**9 + stamp.nanosec)


class Worker:
    """Decodes, processes and publishes the newest frames; drops those it has no time for."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        decode: Decoder,
        settings: Callable[[], Settings],
        publish: Callable[[list[Result], list[Any]], None],
        problem: Callable[[str, str], None],
        trace: Callable[[str], object],
        statistics: Statistics,
    ) -> None:
        """publish(results, headers) gets what came of the frames, one of each camera.

        problem(kind, sentence) hears of frames that were 'damaged', or have 'failed': then with
        a traceback. trace(sentence) hears how long each step took of what was processed.
        """
        self.pipeline = pipeline
        self.busy_since: float | None = None  # time.monotonic(); None: it waits for a frame
        self._decode = decode
        self._settings = settings
        self._publish = publish
        self._problem = problem
        self._trace = trace
        self._statistics = statistics
        self._mailbox: Mailbox[Sequence[Arrival]] = Mailbox()
        self._reset = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def submit(self, arrivals: Sequence[Arrival]) -> None:
        """One image of each camera."""
        if self._mailbox.put(arrivals):
            self._statistics.count('dropped', len(arrivals))

    def reset(self) -> None:
        """Tracks restart with the next frame."""
        self._reset.set()

    def stop(self, timeout: float) -> bool:
        """Stop after the current frame. False if that takes longer; the worker then continues."""
        self._mailbox.close()
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._mailbox.close(False)
            return False
        if self._mailbox.empty():
            self._statistics.count('dropped', len(self.pipeline.streams))
        return True

    def _run(self) -> None:
        while (arrivals := self._mailbox.take()) is not None:
            self.busy_since = time.monotonic()
            try:
                self._work(arrivals)
            except Exception as error:  # whatever it is, the next frame has its chance
                self._problem(  # before it counts: whoever sees the count can name the reason
                    'failed', f'{type(error).__name__}: {error}\n{traceback.format_exc()}'
                )
                self._statistics.count('failed', len(arrivals))
            self.busy_since = None

    def _work(self, arrivals: Sequence[Arrival]) -> None:
        if self._reset.is_set():
            self._reset.clear()
            self.pipeline.reset('asked for')
        settings = self._settings()
        began = time.monotonic()
        try:
            frames = [self._frame(arrival, settings) for arrival in arrivals]
        except ValueError as error:
            self._problem('damaged', str(error))
            self._statistics.count('damaged', len(arrivals))
            return
        decoded = time.monotonic()
        results = self.pipeline.process_all(frames, settings)
        processed = time.monotonic()
        self._publish(results, [arrival.message.header for arrival in arrivals])
        now = time.monotonic()
        arrived = max(arrival.arrived for arrival in arrivals)
        inference = results[0].inference_time
        tracking = sum(result.total_time - inference for result in results)
        self._trace(
            f'frame {frames[0].stamp}: waited {1e3 * (began - arrived):.2f}, '
            f'decoded {1e3 * (decoded - began):.2f}, '
            f'detected {1e3 * inference:.2f}, '
            f'tracked {1e3 * tracking:.2f}, '
            f'published {1e3 * (now - processed):.2f} ms'
        )
        for result in results:
            self._statistics.add(Sample.of(result, now, now - arrived))

    def _frame(self, arrival: Arrival, settings: Settings) -> Frame:
        """ValueError if its image cannot be used."""
        header = arrival.message.header
        frame = Frame(
            image=self._decode(arrival.message),
            stamp=arrival.stamp,
            frame_id=header.frame_id,
            camera=arrival.camera,
            mask=arrival.mask,
            baseline=arrival.baseline,
        )
        self.pipeline.check(frame, settings)
        return frame
