"""Statistics of the node and its diagnostics: figures, warnings, advice."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

from kp2d_ros.pipeline import FEW, Result, Statistics
from kp2d_ros.settings import Settings

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
STATUS_SUFFIX = ': keypoints'  # of a status's name, after the node's
WINDOW = 5.0  # seconds over which rates and percentiles are computed
SILENCE = 2.0  # seconds without an image before a warning
HANG = 5.0  # seconds at one frame before a warning, if a frame usually takes at most a tenth of it
REPEAT = 30.0  # seconds before a lasting problem is logged again
PROGRESS = 5.0  # seconds between two progress messages


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
    textureless: float = 0.0  # share of frames with next to no strong keypoints
    black: float = 0.0  # share of frames


def summarize(statistics: Statistics, now: float | None = None) -> Summary:
    """The last seconds before now, of time.monotonic()."""
    now = time.monotonic() if now is None else now
    recent = statistics.since(now - WINDOW)
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
        textureless=float(np.mean([sample.strong < FEW for sample in recent])),
        black=float(np.mean([sample.black for sample in recent])),
    )


@dataclass
class Health:
    """The state of the node that a report is made from."""

    topic: str
    middleware: str = ''  # such as rmw_fastrtps_cpp
    active: bool = False
    active_for: float = SILENCE  # seconds
    enabled: bool = True
    wanted: bool = True  # somebody subscribes
    since_image: float | None = None  # seconds since the last one; None: never
    publishers: int = 0
    incompatible: str = ''  # the QoS policy that keeps a publisher from being heard
    bad_camera_info: str = ''  # why the last camera_info cannot be used
    uncalibrated: str = ''  # why the last frame has no calibration, although one is wanted
    loading: str = ''  # the slow task in progress: 'loading the model', ...
    loading_for: float = 0.0  # seconds
    busy_for: float = 0.0  # seconds spent on the current frame
    refused: str = ''  # settings that cannot be used, and why
    last_problem: str = ''  # the last damaged frame or failure, in a sentence
    model: str = ''  # what runs, and in what
    runtime: str = ''
    resets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Assessment:
    level: bytes
    kind: str  # the same for the same problem, whatever its figures
    message: str  # the one sentence that matters most


def assess(health: Health, since: dict[str, int], summary: Summary) -> Assessment:
    """`since`: how much the counts have grown since the last report."""

    def say(level: bytes, kind: str, message: str) -> Assessment:
        return Assessment(level, kind, message)

    topic, received = health.topic, since['received']
    if not health.active:
        if health.loading:
            return say(OK, 'loading', f'{health.loading}, {health.loading_for:.0f} s so far')
        return say(OK, 'not active', 'not active')
    if health.busy_for > max(HANG, 10 * summary.inference_p50) and not health.loading:
        return say(ERROR, 'hangs', f'the model has worked on one frame for {health.busy_for:.0f} '
                   's without an answer: restart the node; if it hangs again, try another '
                   'runtime')  # fmt: skip
    if since['failed']:
        every = not since['processed'] and 'every frame fails'
        return say(ERROR, 'failed', f'{every or str(since["failed"]) + " frames failed"}: '
                   f'{health.last_problem}. The log has the traceback; if it is the model, try '
                   'another runtime, or precision: fp32')  # fmt: skip
    if since['damaged']:
        return say(WARN, 'damaged', f'{since["damaged"]} frames could not be used: '
                   f'{health.last_problem}')  # fmt: skip
    if health.incompatible:
        return say(WARN, 'incompatible', f'a publisher of {topic} offers another '
                   f'{health.incompatible}: set the parameter reliability to auto, or remove its '
                   'QoS override')  # fmt: skip
    if health.since_image is None and health.active_for < SILENCE:
        return say(OK, 'waiting', f'waiting for images on {topic}')
    if health.since_image is None or health.since_image > SILENCE:
        if not health.publishers:
            return say(WARN, 'nobody publishes',
                       f'nobody publishes {topic}: start the camera, or remap image')  # fmt: skip
        return say(WARN, 'silence', f'no image on {topic}, although it has a publisher: check '
                   'that the camera runs and that image_transport matches it')  # fmt: skip
    if not health.enabled:
        return say(OK, 'disabled', 'disabled by the service')
    if not health.wanted:
        return say(OK, 'idle', 'idle: nobody subscribes')
    if health.loading and not since['processed']:
        return say(WARN, 'loading', f'no keypoints yet: {health.loading}, '
                   f'{health.loading_for:.0f} s so far')  # fmt: skip
    if health.refused:
        return say(WARN, 'refused', f'{health.refused}; the previous settings stay in use')
    if health.bad_camera_info:
        return say(WARN, 'calibration', f'camera_info is not used: {health.bad_camera_info}; '
                   'calibrate the camera, or remap camera_info')  # fmt: skip
    if health.uncalibrated:
        return say(WARN, 'calibration', health.uncalibrated)
    if summary.black > 0.5:
        return say(WARN, 'black', 'the images are black: check the lens cap, the light and the '
                   'exposure')  # fmt: skip
    if summary.textureless > 0.5:
        return say(
            WARN,
            'no texture',
            'no texture: the image has almost no distinct points; check focus and exposure, or '
            'turn the camera away from a blank wall',
        )
    if since['unpaired'] > 0.1 * received:
        return say(WARN, 'unpaired', f'{since["unpaired"]} of {received} images had no partner of '
                   'another camera: their stamps differ by more than sync_tolerance')  # fmt: skip
    arrived = received + since['lost']
    if since['lost'] > 0.1 * arrived:
        return say(WARN, 'lost', f'{since["lost"]} of {arrived} frames were lost on the way: '
                   + against_loss(health.middleware))  # fmt: skip
    if since['dropped'] > 0.1 * received:
        return say(OK, 'fast camera', f'{summary.rate:.1f} Hz, the camera is faster: '
                   f'{since["dropped"]} of {received} frames dropped; a smaller working_size or '
                   'fewer scales help')  # fmt: skip
    rate = f'{summary.rate:.1f} Hz' if summary.rate else 'images arrive'
    return say(OK, 'well', rate)


def calibration_fault(result: Result, settings: Settings) -> str:
    """Explain why the camera_info of a frame cannot be used, if it matters; '': no fault."""
    camera, size = result.frame.camera, result.features.image_size
    if camera is None and settings.verification == 'essential':
        return 'no calibrated camera_info: matches are verified with the fundamental matrix'
    if camera is not None and camera.of(size) is None:
        return (
            f'camera_info is for {camera.size[0]}x{camera.size[1]} images, not '
            f'{size[0]}x{size[1]}: it is not used'
        )
    return ''


def against_loss(middleware: str) -> str:
    """Advise how to prevent loss, for the middleware in use."""
    if 'fastrtps' in middleware:
        return (
            "start the camera and this node with this package's Fast DDS profile "
            '(config/fastdds.xml), or reduce the load on this machine'
        )
    if 'cyclonedds' in middleware:
        return (
            'raise the receive buffer (sysctl net.core.rmem_max=8388608, and '
            'SocketReceiveBufferSize in CYCLONEDDS_URI), or reduce the load on this machine'
        )
    if 'zenoh' in middleware:
        return (
            'enable shared memory in the Zenoh session configuration, or reduce the load on this '
            'machine'
        )
    return 'give the middleware larger buffers, or reduce the load on this machine'


def status(
    name: str, health: Health, assessment: Assessment, counts: dict[str, int], summary: Summary
) -> DiagnosticStatus:
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
        'middleware': health.middleware,
        'loading': health.loading or 'nothing',
        **{f'frames {key}': value for key, value in counts.items()},
        **{f'reset: {reason}': count for reason, count in health.resets.items()},
        'last problem': health.last_problem or 'none',
    }
    return DiagnosticStatus(
        level=assessment.level,
        name=name + STATUS_SUFFIX,
        message=assessment.message,
        hardware_id=health.topic,
        values=[KeyValue(key=key, value=str(value)) for key, value in values.items()],
    )


class Console:
    """Logs on the console when the state gets worse or better, at a limited rate."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._told: dict[str, float] = {}  # kind of problem -> when it was named last
        self._troubled = False

    def tell(self, assessment: Assessment, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        kind, loading = assessment.kind, assessment.kind == 'loading'
        well_again = self._troubled and kind in ('well', 'fast camera')
        if assessment.level == OK and not loading and not well_again:
            return
        pause = PROGRESS if loading else REPEAT
        if now - self._told.get(kind, -pause) < pause:
            return
        self._told[kind] = now
        self._troubled = not well_again and not loading
        if loading:
            self._logger.info(assessment.message)
        elif well_again:
            self._logger.info(f'recovered: {assessment.message}')
        elif assessment.level == ERROR:
            self._logger.error(assessment.message)
        else:
            self._logger.warning(assessment.message)
