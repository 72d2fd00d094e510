"""What diagnostics and console say of a node's health."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip('rclpy')

from kp2d_core import KeypointDetector
from kp2d_ros import diagnostics
from kp2d_ros.diagnostics import (
    ERROR,
    OK,
    WARN,
    Assessment,
    Console,
    Health,
    Summary,
    summarize,
)
from kp2d_ros.pipeline import Frame, Pipeline, Sample, Statistics
from kp2d_ros.settings import Settings

QUIET = dict.fromkeys(Statistics.COUNTERS, 0)
WELL = Health(topic='/image', active=True, since_image=0.1, publishers=1)


@pytest.mark.parametrize(
    ('health', 'since', 'level', 'words'),
    [
        (Health('/image'), {}, OK, 'not active'),
        (WELL, {'received': 30}, OK, '12.0 Hz'),
        (replace(WELL, last_problem='it broke'), {'failed': 1}, ERROR, 'every frame fails: it br'),
        (WELL, {'failed': 2, 'processed': 9}, ERROR, '2 frames failed'),
        (replace(WELL, busy_for=9.0), {}, ERROR, 'on one frame for 9 s'),
        (replace(WELL, busy_for=9.0, loading='compiling'), {}, WARN, 'no keypoints yet: compili'),
        (replace(WELL, active=False, loading='loading', loading_for=7.0), {}, OK, '7 s so far'),
        (replace(WELL, since_image=None, active_for=0.5), {}, OK, 'waiting for images'),
        (replace(WELL, refused='too large'), {}, WARN, 'too large; the previous settings stay'),
        (
            replace(WELL, last_problem='too small'),
            {'damaged': 2},
            WARN,
            '2 frames could not be us',
        ),
        (replace(WELL, incompatible='RELIABILITY'), {}, WARN, 'reliability to auto'),
        (replace(WELL, since_image=None, publishers=0), {}, WARN, 'nobody publishes /image'),
        (replace(WELL, since_image=9.0), {}, WARN, 'no image on /image'),
        (replace(WELL, enabled=False), {}, OK, 'disabled'),
        (replace(WELL, wanted=False), {}, OK, 'idle'),
        (replace(WELL, uncalibrated='no camera_info'), {}, WARN, 'no camera_info'),
        (replace(WELL, bad_camera_info='K holds NaN'), {}, WARN, 'K holds NaN; calibrate'),
        (WELL, {'received': 20, 'lost': 10}, WARN, '10 of 30 frames were lost'),
        (replace(WELL, middleware='rmw_fastrtps_cpp'), {'lost': 1}, WARN, 'Fast DDS profile'),
        (replace(WELL, middleware='rmw_cyclonedds_cpp'), {'lost': 1}, WARN, 'CYCLONEDDS_URI'),
        (replace(WELL, middleware='rmw_zenoh_cpp'), {'lost': 1}, WARN, 'Zenoh'),
        (WELL, {'received': 30, 'dropped': 25}, OK, 'the camera is faster: 25 of 30'),
    ],
)
def test_diagnostics_say_what_matters(health, since, level, words):
    found = diagnostics.assess(health, {**QUIET, **since}, Summary(rate=12.0))
    assert found.level == level and words in found.message


def test_what_the_camera_shows_is_judged(photographs):
    """With the model that ships: black, blank, and a photograph."""
    pipeline = Pipeline(KeypointDetector.load('small', threads=1))
    photograph = photographs['coffee'][:240, :320]
    wall = np.full_like(photograph, 140)
    for image, words in (
        (photograph * 0, 'are black'),
        (wall, 'no texture'),
        (photograph, 'Hz'),
    ):
        statistics = Statistics()
        for number in range(3):
            result = pipeline.process(Frame(image, number), Settings())
            statistics.add(Sample.of(result, number / 10, 0.1))
        found = diagnostics.assess(WELL, QUIET, summarize(statistics, now=0.3))
        assert words in found.message
        assert found.level == (OK if image is photograph else WARN)


class Heard:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        for kind in ('info', 'warning', 'error'):
            setattr(self, kind, lambda text, k=kind: self.lines.append(f'{k}: {text}'))


def test_the_console_hears_of_changes_and_not_too_often():
    heard = Heard()
    console = Console(heard)
    well, lost = Assessment(OK, 'well', '9 Hz'), Assessment(WARN, 'lost', '3 of 9')
    broken = Assessment(ERROR, 'failed', 'it broke')
    console.tell(well, 0.0)
    assert heard.lines == []
    for now in range(1, 40):
        console.tell(lost if now % 2 else well, float(now))
    console.tell(broken, 40.0)
    console.tell(well, 80.0)
    assert heard.lines == [
        'warning: 3 of 9', 'info: recovered: 9 Hz', 'warning: 3 of 9',
        'info: recovered: 9 Hz', 'error: it broke', 'info: recovered: 9 Hz',
    ]  # fmt: skip
