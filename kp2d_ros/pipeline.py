"""From image messages to results, without ROS, in two threads: decode, detect, track.

Several cameras have two threads each, if the runtime can run their images at the same time.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import cv2
import numpy as np

from kp2d_core.camera import Camera
from kp2d_core.detector import Compiler, KeypointDetector, Work
from kp2d_core.features import Features, Selection, find
from kp2d_core.images import Image, Size, check_image, check_mask
from kp2d_core.tracking import Frame as Frame
from kp2d_core.tracking import Result as Result
from kp2d_core.tracking import Stream
from kp2d_ros.settings import Settings
from kp2d_ros.stereo import Pairing

THREAD_NAME = 'kp2d worker'
HEAD_START = 5e-4  # seconds, for the worker: it and the executor share the interpreter
# A lane may begin the next images when the others have worked on theirs for this share of the time
# they usually take. With 1, cores wait for each other; with 0, results of one moment come apart.
ALONG = 0.5
BLACK = 16  # of 255: the brightest pixel of a covered lens
STRONG, FEW = 0.45, 20  # a textured image has more keypoints than these few above this score

Item = TypeVar('Item')
Plan = tuple[Work, list[list[Size]]]  # compiled settings, and the sizes for each frame


class Pipeline:
    """Detects and tracks in the frames of one camera or several.

    The cameras are shared out to lanes, which work at the same time. In each, one thread at a time
    detects and one tracks.
    """

    def __init__(
        self,
        detector: KeypointDetector,
        mask: Image | None = None,
        *,
        cameras: int = 1,
        in_background: bool = False,
    ) -> None:
        """With `in_background`, old settings stay in use while the new ones are compiled."""
        self.detector = detector
        self.mask = mask
        self.compiler = Compiler(detector, in_background)
        self.streams = [Stream() for _ in range(cameras)]
        # The images of a lane run as one batch, those of other lanes at the same time.
        shares = detector.runtime.share(cameras) if cameras > 1 else 1
        self.lanes = [range(first, cameras, shares) for first in range(shares)]
        self._usable: set[tuple[Any, ...]] = set()  # settings and sizes that passed `check`
        self._plan: tuple[tuple[Any, ...], Plan] | None = None

    @property
    def resets(self) -> dict[str, int]:
        """Reason -> how often tracks restarted."""
        total: Counter[str] = Counter()
        for stream in self.streams:
            total.update(dict(stream.resets))
        return dict(total)

    def check(self, frame: Frame, settings: Settings) -> None:
        """Raise ValueError if the frame cannot be used with these settings."""
        image, width, scales = frame.image, settings.working_size, settings.scales
        facts = getattr(image, 'shape', None), getattr(image, 'dtype', None), width, scales
        if facts in self._usable:
            return
        check_image(image)
        if self.mask is not None:
            check_mask(self.mask, frame.size)
        self.detector.working_sizes(frame.size, width or None, scales)
        self._usable.add(facts)

    def process(self, frame: Frame, settings: Settings) -> Result:
        """Process a frame of the only camera; raise ValueError if it is unusable."""
        self.check(frame, settings)
        return self.follow([frame], *self.detect([frame], settings), settings)[0]

    def detect(self, frames: Sequence[Frame], settings: Settings) -> tuple[list[Features], float]:
        """Detect the features of checked frames, one per camera; also return the seconds."""
        plan, began = self.plan(frames, settings), time.perf_counter()
        features: dict[int, Features] = {}
        for lane in self.lanes:
            found, _ = self.detect_in(lane, frames, plan, settings)
            features.update(zip(lane, found, strict=True))
        return [features[camera] for camera in range(len(frames))], time.perf_counter() - began

    def detect_in(
        self, lane: range, frames: Sequence[Frame], plan: Plan, settings: Settings
    ) -> tuple[list[Features], float]:
        """Detect the features of the frames of a lane."""
        (work, sizes), began = plan, time.perf_counter()
        features = find(
            self.detector.runtime,
            [frames[camera].image for camera in lane],
            [sizes[camera] for camera in lane],
            work.limit,
            Selection(settings.max_keypoints, settings.score_threshold, settings.nms_radius),
            [self._mask(frames[camera]) for camera in lane],
        )
        return features, time.perf_counter() - began

    def follow(
        self,
        frames: Sequence[Frame],
        features: Sequence[Features],
        spent: float,
        settings: Settings,
        lane: range | None = None,
    ) -> list[Result]:
        """Track the detected features of a lane; None: of all cameras."""
        cameras = range(len(self.streams)) if lane is None else lane
        return [
            self.streams[camera].follow(frames[camera], each, settings, spent)
            for camera, each in zip(cameras, features, strict=True)
        ]

    def prepare(self, sizes: Sequence[Size], settings: Settings) -> None:
        """Compile and warm up for images of these sizes, before any comes."""
        blank = [Frame(np.zeros((height, width, 3), np.uint8), 0) for width, height in sizes]
        self.detect(blank, settings)

    def reset(self, reason: str, lane: range | None = None) -> None:
        """Restart the tracks of a lane; None: all. Ids are never reused."""
        for camera in range(len(self.streams)) if lane is None else lane:
            self.streams[camera].reset(reason)

    def _mask(self, frame: Frame) -> Image | None:
        if frame.mask is None:
            return self.mask
        mask = frame.mask
        if mask.shape[:2] != frame.image.shape[:2]:
            nearest = cv2.resize(mask, frame.size, interpolation=cv2.INTER_NEAREST)
            mask = np.asarray(nearest, np.uint8)
        return mask if self.mask is None else np.minimum(self.mask, mask)

    def plan(self, frames: Sequence[Frame], settings: Settings) -> Plan:
        """Return the compiled settings to use now, and the sizes for each frame."""
        masked = self.mask is not None or any(frame.mask is not None for frame in frames)
        asked = tuple(frame.size for frame in frames), settings, masked
        if self._plan is not None and self._plan[0] == asked:
            return self._plan[1]
        together: Counter[Size] = Counter()  # the largest batch of each size
        for lane in self.lanes:
            together |= Counter(frames[camera].size for camera in lane)
        wanted = Work(
            tuple(together.elements()),
            settings.working_size or None,
            settings.scales,
            self.detector.limit(settings.max_keypoints, settings.nms_radius, masked),
        )
        work = self.compiler.ready_for(wanted)
        sizes = [
            self.detector.working_sizes(frame.size, work.working_size, work.scales)
            for frame in frames
        ]
        self._plan = (asked, (work, sizes)) if work == wanted else None
        return work, sizes


class Mailbox(Generic[Item]):
    """One slot between threads; a newer item replaces an older one.

    With several takers, each takes every item that one of them took. None takes the next one
    before the others are well along with theirs.
    """

    def __init__(self, takers: int = 1) -> None:
        self._changed = threading.Condition()
        self._item: Item | None = None
        self._closed = False
        self._taken: Item | None = None
        self._late: set[int] = set()  # takers that are still to take what another took
        self._began = [0.0] * takers  # time.monotonic() when each took its last item
        self._usual = [math.inf] * takers  # seconds that each worked on the item before
        self._due = [0.0] * takers  # when it is well along; 0: it waits

    def put(self, item: Item) -> bool:
        """Put an item; return True if it replaced an older one."""
        with self._changed:
            replaced = self._item is not None
            self._item = item
            self._changed.notify_all()
            return replaced

    def hand_over(self, item: Item) -> None:
        """Put an item once the previous one is taken, or the box is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._item is None)
            self._item = item
            self._changed.notify_all()

    def take(self, taker: int = 0) -> Item | None:
        """Wait for an item and take it; None while the box is closed."""
        with self._changed:
            self._usual[taker] = time.monotonic() - self._began[taker]
            self._due[taker] = 0.0
            self._changed.notify_all()
            while taker not in self._late:
                if self._closed:
                    return None
                if self._item is None or self._late:
                    self._changed.wait()
                elif (left := max(self._due) - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    self._taken, self._item = self._item, None
                    self._late = {*range(len(self._due))}
                    self._changed.notify_all()
            self._late.remove(taker)
            self._began[taker] = time.monotonic()
            self._due[taker] = self._began[taker] + ALONG * self._usual[taker]
            item = self._taken
            if not self._late:
                self._taken = None
                self._changed.notify_all()
            return item

    def close(self, closed: bool = True) -> None:
        """Wake waiting threads. The box can be opened again."""
        with self._changed:
            self._closed = closed
            self._changed.notify_all()

    def empty(self) -> bool:
        """Drop the item; return True if there was one."""
        with self._changed:
            left = self._item is not None
            self._item = None
            return left


@dataclass(frozen=True)
class Arrival:
    """An image message with the calibration and mask at its arrival."""

    message: Any
    arrived: float  # time.monotonic()
    camera: Camera | None
    mask: Image | None = None
    baseline: float = 0.0
    lost: int = 0  # missing messages before it

    @property
    def stamp(self) -> int:
        """Nanoseconds."""
        stamp = self.message.header.stamp
        return int(stamp.sec * 10**9 + stamp.nanosec)


@dataclass(frozen=True)
class Sample:
    """One processed frame."""

    finished: float  # time.monotonic()
    latency: float  # seconds from arrival to published
    inference: float  # seconds in the detector
    keypoints: int
    matches: int
    inliers: int
    strong: int = FEW  # keypoints with a score that texture gives
    black: bool = False

    @classmethod
    def of(cls, result: Result, finished: float, latency: float) -> Sample:
        matches = result.tracks.matches if result.tracks is not None else None
        return cls(
            finished,
            latency,
            result.inference_time,
            len(result.features),
            0 if matches is None else len(matches),
            0 if matches is None else int(matches.inliers.sum()),
            int(np.count_nonzero(result.features.scores > STRONG)),
            bool(result.frame.image[::8, ::8].max() <= BLACK),
        )


class Statistics:
    """Thread-safe counts. Each received frame is counted in exactly one other way."""

    # received  = processed + dropped + skipped + damaged + failed + unpaired (+ those in work)
    # dropped     a newer frame came before this one's turn
    # skipped     nobody subscribed, or the node was disabled
    # damaged     not a usable image
    # failed      the model, or our own code, threw
    # unpaired    of several cameras: the others had no image of the same time
    # lost        never arrived, by the gaps in the publisher's sequence numbers
    COUNTERS = (
        'received', 'processed', 'dropped', 'skipped', 'damaged', 'failed', 'unpaired', 'lost',
    )  # fmt: skip

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._samples: deque[Sample] = deque(maxlen=2000)

    def count(self, name: str, by: int = 1) -> None:
        assert name in self.COUNTERS, name
        with self._lock:
            self._counts[name] += by

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in self.COUNTERS}

    def add(self, sample: Sample) -> None:
        with self._lock:
            self._counts['processed'] += 1
            self._samples.append(sample)

    def since(self, begin: float) -> list[Sample]:
        """Frames that were finished after a time."""
        with self._lock:
            return [sample for sample in self._samples if sample.finished >= begin]


class Output(Protocol):
    """Where results of one camera go; `kp2d_ros.outputs` has the node's."""

    @property
    def publishers(self) -> Sequence[Any]:
        """Each has get_subscription_count()."""

    def publish(self, result: Result, header: Any, settings: Settings) -> None:
        """Publish what concerns this camera alone."""

    def publish_stereo(
        self, first: Result, result: Result, header: Any, settings: Settings
    ) -> None:
        """Publish matches with the first camera, whose result and header these are."""


@dataclass
class Job:
    """The frames of one moment, one per camera."""

    arrivals: Sequence[Arrival]
    settings: Settings
    began: float = 0.0  # time.monotonic()
    frames: list[Frame] = field(default_factory=list)
    plan: Plan | None = None
    problem: str = ''  # 'damaged' or 'failed': it cannot be processed
    results: dict[int, Result] = field(default_factory=dict)  # by camera
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class Stage:
    """What one thread does for the frames of a lane."""

    lane: range
    box: Mailbox[Any]
    work: Callable[[range, Any], None]
    taker: int = 0
    thread: threading.Thread | None = None


class Worker:
    """Processes the newest frames and drops those it has no time for.

    Each lane of the pipeline has two threads. One decodes and detects, the other tracks and
    publishes. Meanwhile the network runs on the next frame.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        decode: Callable[[Any], Image],
        settings: Settings,
        outputs: Sequence[Output],
        problem: Callable[[str, str], None],
        trace: Callable[[str], object],
        statistics: Statistics,
    ) -> None:
        """outputs: one for each camera.

        problem(kind, sentence) hears of frames that were 'damaged', or have 'failed': then with
        a traceback. trace(sentence) hears how long each step took of what was processed.
        """
        self.pipeline = pipeline
        self.settings = settings
        self.enabled = True
        self.latest: list[Result] = []  # the last results, one of each camera
        self._decode = decode
        self._outputs = outputs
        self._problem = problem
        self._trace = trace
        self._statistics = statistics
        cameras, lanes = len(pipeline.streams), pipeline.lanes
        self._to_reset: set[range] = set()  # lanes
        self._pairing: Pairing[Arrival] | None = Pairing(cameras) if cameras > 1 else None
        self._arrived: Mailbox[Job] = Mailbox(len(lanes))
        self._busy: dict[Stage, float] = {}  # since when
        detected = [Stage(lane, Mailbox(), self._finish) for lane in lanes]
        self._stages = [
            *(
                Stage(lane, self._arrived, partial(self._detect, following), number)
                for number, (lane, following) in enumerate(zip(lanes, detected, strict=True))
            ),
            *detected,
        ]
        self._start()

    @property
    def busy_since(self) -> float | None:
        """time.monotonic(); None: it waits for a frame."""
        return min([*self._busy.values()], default=None)

    def wanted(self) -> bool:
        """Whether anybody subscribes to any output."""
        return any(
            publisher.get_subscription_count() > 0
            for output in self._outputs
            for publisher in output.publishers
        )

    def submit(self, camera: int, arrival: Arrival) -> None:
        """An image of a camera."""
        count, arrivals = self._statistics.count, [arrival]
        count('received')
        if arrival.lost:
            count('lost', arrival.lost)
        if not self.enabled or not self.wanted():
            count('skipped')
            return
        if self._pairing is not None:
            tolerance = round(self.settings.sync_tolerance * 1e9)
            together, gone = self._pairing.add(camera, arrival.stamp, arrival, tolerance)
            count('unpaired', gone)
            if together is None:
                return
            arrivals = together
        if self._arrived.put(Job(arrivals, self.settings)):
            count('dropped', len(arrivals))
        time.sleep(HEAD_START)

    def reset(self) -> None:
        """Tracks restart with the next frame."""
        self._to_reset = {*self.pipeline.lanes}

    def stop(self, timeout: float) -> bool:
        """Stop after the current frame. False if that takes longer; the worker then continues."""
        end = time.monotonic() + timeout
        for stage in self._stages:
            stage.box.close()
            assert stage.thread is not None
            stage.thread.join(max(end - time.monotonic(), 0.01))
            if stage.thread.is_alive():
                self._start()
                return False
        if self._arrived.empty():
            self._statistics.count('dropped', len(self.pipeline.streams))
        for stage in self._stages:
            if stage.box.empty():
                self._statistics.count('dropped', len(stage.lane))
        return True

    def _start(self) -> None:
        """Start the stages that are not running."""
        for stage in self._stages:
            stage.box.close(False)
            if stage.thread is None or not stage.thread.is_alive():
                stage.thread = threading.Thread(
                    target=self._run, args=(stage,), name=THREAD_NAME, daemon=True
                )
                stage.thread.start()

    def _run(self, stage: Stage) -> None:
        while (item := stage.box.take(stage.taker)) is not None:
            self._busy[stage] = time.monotonic()
            try:
                stage.work(stage.lane, item)
            except Exception as error:  # the next frame may succeed
                self._problem(  # before it counts: whoever sees the count can name the reason
                    'failed', f'{type(error).__name__}: {error}\n{traceback.format_exc()}'
                )
                self._statistics.count('failed', len(stage.lane))
            with suppress(KeyError):
                del self._busy[stage]

    def _detect(self, following: Stage, lane: range, job: Job) -> None:
        with job.lock:  # the first lane does it for all
            if not job.began:
                self._open(job)
        if job.problem:
            self._statistics.count(job.problem, len(lane))
            return
        assert job.plan is not None
        found = self.pipeline.detect_in(lane, job.frames, job.plan, job.settings)
        following.box.hand_over((job, *found))

    def _open(self, job: Job) -> None:
        """Decode and check the images, and compile for them if needed."""
        job.began, job.settings, job.problem = time.monotonic(), self.settings, 'failed'
        try:
            for arrival in job.arrivals:
                frame = Frame(
                    image=self._decode(arrival.message),
                    stamp=arrival.stamp,
                    frame_id=arrival.message.header.frame_id,
                    camera=arrival.camera,
                    mask=arrival.mask,
                    baseline=arrival.baseline,
                )
                self.pipeline.check(frame, job.settings)
                job.frames.append(frame)
        except ValueError as error:
            self._problem('damaged', str(error))
            job.problem = 'damaged'
            return
        job.plan = self.pipeline.plan(job.frames, job.settings)
        job.problem = ''

    def _finish(self, lane: range, detected: tuple[Job, list[Features], float]) -> None:
        job, features, spent = detected
        if lane in self._to_reset:
            self._to_reset.discard(lane)
            self.pipeline.reset('asked for', lane)
        results = self.pipeline.follow(job.frames, features, spent, job.settings, lane)
        followed = time.monotonic()
        for camera, result in zip(lane, results, strict=True):
            header = job.arrivals[camera].message.header
            self._outputs[camera].publish(result, header, job.settings)
        with job.lock:
            job.results.update(zip(lane, results, strict=True))
            complete = len(job.results) == len(job.arrivals)
        if complete:  # by the last of the lanes
            together = [job.results[camera] for camera in range(len(job.arrivals))]
            for output, result in zip(self._outputs[1:], together[1:], strict=True):
                header = job.arrivals[0].message.header
                output.publish_stereo(together[0], result, header, job.settings)
            self.latest = together
        now = time.monotonic()
        arrived = max(arrival.arrived for arrival in job.arrivals)
        tracking = sum(result.total_time - spent for result in results)
        self._trace(
            f'frame {job.frames[lane[0]].stamp}: waited {1e3 * (job.began - arrived):.2f}, '
            f'detected {1e3 * spent:.2f}, tracked {1e3 * tracking:.2f}, '
            f'published {1e3 * (now - followed):.2f} ms'
        )
        for result in results:
            self._statistics.add(Sample.of(result, now, now - arrived))
