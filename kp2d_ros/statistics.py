"""What the node counts and times, over its life and over the last seconds."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

WINDOW = 5.0  # seconds that rates and percentiles look back


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
