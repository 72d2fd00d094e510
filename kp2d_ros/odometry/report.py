"""Diagnostics of the odometry node: state, figures, advice."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from diagnostic_msgs.msg import DiagnosticStatus, KeyValue

from kp2d_core.odometry import Estimate, State

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
SUFFIX = ': odometry'  # of the name of the status, after the name of the node
SILENCE = 2.0  # warn after this many seconds without keypoints
SLOW_START = 10.0  # warn after this many seconds in the state starting
LONG_LOSS = 5.0  # seconds; a longer loss is an error
NEWS = 10.0  # warn for this many seconds of a new map and of an arbitrary scale

ARBITRARY = (
    'the scale is ARBITRARY: one camera measures directions, not distances. Positions and speeds '
    'are not in metres, and each new map has a different scale. Set camera_height or scale, or '
    'use a stereo pair'
)

SLOW = (
    'odometry is slower than the keypoint node and drops frames: lower the frame rate of the '
    'camera, or working_size or max_keypoints of the keypoint node'
)


@dataclass
class OdometryHealth:
    """The data of a report. Times are in seconds before now; None: never."""

    topic: str
    active: bool = False
    active_for: float = 0.0
    since_keypoints: float | None = None
    publishers: int = 0
    has_camera_info: bool = False
    last: Estimate | None = None
    in_state_for: float = 0.0  # seconds since the last change of state
    map_age: float | None = None  # seconds since the current map began
    tracked: bool = False  # at least one frame had a pose
    tracked_for: float = 0.0  # seconds since the first pose
    scale: str = 'arbitrary'
    words: str = 'learned from the frames'  # the visual words that find places again
    problem: str = ''  # latest problem since the last report
    failed: bool = False  # the problem is an error in our code
    last_problem: str = ''
    overflow: int = 0  # frames dropped by a full queue since the last report
    frames: Counter[str] = field(default_factory=Counter)
    resets: Counter[str] = field(default_factory=Counter)
    rate: float = 0.0
    update_ms: float = 0.0  # median, of the last frames
    note: str = ''  # why /tf is not published, such as: no tf2_msgs


def assess(health: OdometryHealth) -> tuple[bytes, str]:
    """Return the level and the most important message."""
    if not health.active:
        return OK, 'not active'
    if health.problem:
        return (ERROR if health.failed else WARN), health.problem
    silent = health.since_keypoints is None or health.since_keypoints > SILENCE
    if silent and health.active_for > SILENCE:
        if not health.publishers:
            return WARN, f'nobody publishes {health.topic}: start the keypoint node, or remap'
        return WARN, f'no keypoints on {health.topic}: does the keypoint node receive images?'
    if not health.has_camera_info:
        if health.active_for < SILENCE:
            return OK, 'waiting for camera_info'
        return ERROR, 'no camera_info: odometry needs a calibrated camera'
    if health.last is None:
        return OK, 'waiting for keypoints'
    level, message = _of_state(health, health.last)
    if health.overflow:
        return max(level, WARN), f'{SLOW} ({health.overflow} since the last report); {message}'
    return level, message


def _of_state(health: OdometryHealth, last: Estimate) -> tuple[bytes, str]:
    state = last.state
    if state == State.STARTING:
        if health.in_state_for < SLOW_START:
            return OK, 'starting: move the camera sideways'
        return WARN, (
            f'starting for {health.in_state_for:.0f} s: move the camera sideways, past near '
            'objects; rotation alone does not help'
        )
    if state == State.LOST:
        advice = (
            f'lost for {health.in_state_for:.0f} s: no pose is published. Go back to a place '
            'that the camera has seen, or call reset'
        )
        return (ERROR if health.in_state_for > LONG_LOSS else WARN), advice
    if last.map_number > 0 and health.map_age is not None and health.map_age < NEWS:
        return WARN, (
            f'a new map began after a loss, number {last.map_number}: it was placed at the last '
            'known pose, and its scale may differ'
        )
    if health.scale == 'arbitrary' and health.tracked_for < NEWS:
        return WARN, ARBITRARY
    known = '' if health.scale.startswith('metres') else f'; scale {health.scale}'
    return OK, f'{state}, {health.rate:.1f} Hz{known}'


def status(name: str, health: OdometryHealth) -> DiagnosticStatus:
    level, message = assess(health)
    last = health.last
    values: dict[str, object] = {
        'state': last.state if last is not None else 'none',
        'map': last.map_number if last is not None else 'none',
        'inliers': last.inliers if last is not None else 0,
        'matches': last.matches if last is not None else 0,
        'reprojection (px)': f'{last.reprojection if last is not None else 0:.2f}',
        'scale': health.scale,
        'visual words': health.words,
        'camera_info': 'known' if health.has_camera_info else 'not known yet',
        'rate (Hz)': f'{health.rate:.2f}',
        'update p50 (ms)': f'{health.update_ms:.1f}',
        **{f'frames {kind}': health.frames[kind] for kind in FRAMES},
        **{f'reset: {why}': count for why, count in sorted(health.resets.items())},
        'tf': health.note or 'published',
        'last problem': health.last_problem or 'none',
    }
    return DiagnosticStatus(
        level=level, name=name + SUFFIX, message=message, hardware_id=health.topic,
        values=[KeyValue(key=key, value=str(value)) for key, value in values.items()],
    )  # fmt: skip


# received = placed + starting + lost + dropped + damaged + failed + repeated (+ one in progress)
#   placed    has a pose
#   dropped   the queue was full, or the node stopped
#   damaged   the message or its calibration cannot be used
#   failed    our code raised an error
#   repeated  has the same stamp as the previous frame
FRAMES = (
    'received', 'placed', 'starting', 'lost', 'dropped', 'damaged', 'failed', 'repeated',
    'unpaired',  # stereo: keypoints of one camera without those of the other
)  # fmt: skip
