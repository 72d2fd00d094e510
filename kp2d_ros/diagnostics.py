"""What the node counts and times, and what /diagnostics says of it: figures, advice."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

WINDOW = 5.0  # seconds that rates and percentiles look back
OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
STATUS_SUFFIX = ': keypoints'  # of a status's name, after the node's
SILENCE = 2.0  # seconds without an image that are worth a warning


@dataclass(frozen=True)
class Sample:
    """One processed frame."""

    finished: float  # time.monotonic()
    latency: float  # seconds from arrival to published
    inference: float  # seconds in the detector
    keypoints: int
    matches: int
    inliers: int


@dataclass(frozen=True)
class Summary:
    """The last seconds; zero where nothing happened."""

    rate: float = 0.0
    latency_p50: float = 0.0
    latency_p95: float = 0.0
    inference_p50: float = 0.0
    keypoints: float = 0.0
    matches: float = 0.0
    inlier_ratio: float = 0.0


class Statistics:
    """Thread-safe. Every frame that arrived is counted in exactly one way, besides `received`."""

    # received  = processed + dropped + skipped + damaged + failed (+ one that is being processed)
    # dropped     a newer frame came before this one's turn
    # skipped     nobody subscribed, or the node was disabled
    # damaged     not a usable image
    # failed      the model or the publisher failed
    # lost        never arrived, by the gaps in the publisher's sequence numbers
    COUNTERS = ('received', 'processed', 'dropped', 'skipped', 'damaged', 'failed', 'lost')

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

    def summary(self, now: float | None = None) -> Summary:
        now = time.monotonic() if now is None else now
        with self._lock:
            recent = [sample for sample in self._samples if now - sample.finished <= WINDOW]
        if not recent:
            return Summary()
        latencies = [sample.latency for sample in recent]
        p50, p95 = np.percentile(latencies, (50, 95))
        span = recent[-1].finished - recent[0].finished
        matches = sum(sample.matches for sample in recent)
        return Summary(
            rate=(len(recent) - 1) / span if span > 0 else len(recent) / WINDOW,
            latency_p50=float(p50),
            latency_p95=float(p95),
            inference_p50=float(np.median([sample.inference for sample in recent])),
            keypoints=float(np.mean([sample.keypoints for sample in recent])),
            matches=matches / len(recent),
            inlier_ratio=sum(sample.inliers for sample in recent) / matches if matches else 0.0,
        )


@dataclass
class Health:
    """What the node knows of itself when it reports."""

    topic: str
    active: bool = False
    enabled: bool = True
    wanted: bool = True  # somebody subscribes
    since_image: float | None = None  # seconds since the last one; None: never
    publishers: int = 0
    incompatible: str = ''  # the QoS policy that keeps a publisher from being heard
    bad_camera_info: str = ''  # why the last camera_info cannot be used
    uncalibrated: str = ''  # why there is no calibration for the last frame, though asked for
    last_problem: str = ''  # the last damaged frame or failure, in a sentence
    model: str = ''  # what runs, and in what
    runtime: str = ''
    resets: dict[str, int] = field(default_factory=dict)


def status(
    name: str,
    health: Health,
    counts: dict[str, int],
    summary: Summary,
    before: dict[str, int],
) -> DiagnosticStatus:
    """`before`: the counts at the last report; warnings are about what happened since."""
    since = {key: value - before.get(key, 0) for key, value in counts.items()}
    level, message = assess(health, since, summary)
    values: dict[str, object] = {
        'image topic': health.topic,
        'rate (Hz)': f'{summary.rate:.2f}',
        'latency p50 (ms)': f'{summary.latency_p50 * 1e3:.1f}',
        'latency p95 (ms)': f'{summary.latency_p95 * 1e3:.1f}',
        'inference p50 (ms)': f'{summary.inference_p50 * 1e3:.1f}',
        'keypoints': f'{summary.keypoints:.0f}',
        'matches': f'{summary.matches:.0f}',
        'inlier ratio': f'{summary.inlier_ratio:.3f}',
        'model': health.model or 'not loaded',
        'runtime': health.runtime or 'not loaded',
        **{f'frames {key}': value for key, value in counts.items()},
        **{f'reset: {reason}': count for reason, count in dict(health.resets).items()},
        'last problem': health.last_problem or 'none',
    }
    return DiagnosticStatus(
        level=level,
        name=name + STATUS_SUFFIX,
        message=message,
        hardware_id=health.topic,
        values=[KeyValue(key=key, value=str(value)) for key, value in values.items()],
    )


def assess(health: Health, since: dict[str, int], summary: Summary) -> tuple[bytes, str]:
    """The level and the one sentence that matters most."""
    if not health.active:
        return OK, 'not active'
    if since['failed']:
        return ERROR, f'{since["failed"]} frames failed: {health.last_problem}'
    if since['damaged']:
        return WARN, f'{since["damaged"]} frames were not usable: {health.last_problem}'
    if health.incompatible:
        return WARN, (
            f'a publisher of {health.topic} offers another {health.incompatible}: set the '
            'parameter reliability to auto'
        )
    if health.since_image is None or health.since_image > SILENCE:
        if not health.publishers:
            return WARN, f'nobody publishes {health.topic}: start the camera, or remap image'
        return WARN, (
            f'no image on {health.topic} though it has a publisher: is the camera running, '
            'and is image_transport right?'
        )
    if not health.enabled:
        return OK, 'disabled by the service'
    if not health.wanted:
        return OK, 'idle: nobody subscribes'
    if health.bad_camera_info or health.uncalibrated:
        return WARN, health.bad_camera_info or health.uncalibrated
    arrived = since['received'] + since['lost']
    if since['lost'] > 0.1 * arrived:
        return WARN, (
            f'{since["lost"]} of {arrived} frames were lost on the way: use the Fast DDS profile '
            'of this package, or ease the load of this machine'
        )
    if since['dropped'] > 0.1 * since['received']:
        return OK, (
            f'{summary.rate:.1f} Hz, the camera is faster: {since["dropped"]} of '
            f'{since["received"]} frames dropped; a smaller working_size or scale helps'
        )
    return OK, f'{summary.rate:.1f} Hz'
