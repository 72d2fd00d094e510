"""The node's small parts, each on its own: mailbox, statistics, worker."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from models import write_responsive_model

pytest.importorskip('rclpy')

from std_msgs.msg import Header

from kp2d_core import KeypointDetector
from kp2d_ros.diagnostics import (
    Summary,
    summarize,
)
from kp2d_ros.pipeline import Arrival, Frame, Mailbox, Pipeline, Sample, Statistics, Worker
from kp2d_ros.settings import Settings
from kp2d_ros.startup import shared_file


def test_mailbox_keeps_the_newest():
    box: Mailbox[int] = Mailbox()
    assert not box.put(1)
    assert box.put(2) and box.put(3)
    assert box.take() == 3
    assert not box.put(4)
    box.close()
    assert box.take() is None
    box.close(False)
    assert box.take() == 4  # still there
    assert not box.empty()
    box.put(5)
    assert box.empty() and not box.empty()


def test_mailbox_wakes_who_waits():
    box: Mailbox[int] = Mailbox()
    taken: list[int | None] = []
    reader = threading.Thread(target=lambda: taken.extend([box.take(), box.take()]))
    reader.start()
    box.put(7)
    deadline = time.monotonic() + 10
    while not taken and time.monotonic() < deadline and box._item is not None:
        time.sleep(0.01)
    box.close()
    reader.join(10)
    assert taken == [7, None]


def test_mailbox_gives_every_taker_the_same():
    box: Mailbox[int] = Mailbox(2)
    box._usual = [60.0, 60.0]
    box.put(1)
    assert box.take(0) == 1
    box.put(2)
    box.close()
    assert box.take(1) == 1  # the other has begun with it
    assert box.take(0) is None and box.take(1) is None
    box.close(False)
    assert box.take(1) == 2 and box.take(0) == 2


def test_mailbox_holds_a_taker_back_until_the_others_are_well_along():
    box: Mailbox[int] = Mailbox(2)
    taken: list[int | None] = []
    box.put(1)
    assert box.take(0) == box.take(1) == 1
    box._due[1] = time.monotonic() + 60
    ahead = threading.Thread(target=lambda: taken.append(box.take(0)))
    ahead.start()
    box.put(2)
    box.put(3)
    time.sleep(0.1)
    assert not taken
    assert box.take(1) == 3  # it is back, and both take the newest
    ahead.join(10)
    assert taken == [3]


def sample(finished: float, **values: float) -> Sample:
    given = {'latency': 0.1, 'inference': 0.08, 'keypoints': 10, 'matches': 4, 'inliers': 3}
    return Sample(finished, **{**given, **values})


def test_statistics_of_the_last_seconds():
    statistics = Statistics()
    assert summarize(statistics) == Summary()
    for number in range(100):
        statistics.add(sample(number / 10, latency=0.1 if number % 10 else 0.5))
    summary = summarize(statistics, now=9.9)
    assert summary.rate == pytest.approx(10)
    assert (summary.latency_p50, summary.inlier_ratio) == (0.1, 0.75)
    assert summary.latency_p95 == pytest.approx(0.5)
    assert summarize(statistics, now=100) == Summary()
    assert statistics.counts()['processed'] == 100
    statistics.count('lost', 3)
    assert statistics.counts()['lost'] == 3


class Moody:
    """A runtime that runs, and throws or hangs when told to."""

    def __init__(self, runtime) -> None:
        self._runtime, self.throws, self.goes_on = runtime, None, threading.Event()
        self.goes_on.set()

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def run(self, images, top_k):
        self.goes_on.wait(60)
        if self.throws is not None:
            raise self.throws
        return self._runtime.run(images, top_k)


class Shared(Moody):
    """One whose images run at the same time; it may hang or throw for dark images only."""

    def __init__(self, runtime) -> None:
        super().__init__(runtime)
        self.dark_throws, self.dark_goes_on = None, threading.Event()

    def share(self, count):
        return count

    def run(self, images, top_k):
        if images.max() < 100:
            assert self.dark_goes_on.wait(60)
            if self.dark_throws is not None:
                raise self.dark_throws
        return super().run(images, top_k)


def worker_of(detector: KeypointDetector, cameras: int) -> SimpleNamespace:
    """A worker, and what became of its frames."""
    statistics, results, pairs, problems, traces = Statistics(), [], [], [], []
    worker = Worker(
        Pipeline(detector, cameras=cameras),
        decode=lambda message: message.pixels,
        settings=Settings(max_keypoints=50),
        outputs=[
            SimpleNamespace(
                publishers=[SimpleNamespace(get_subscription_count=lambda: 1)],
                publish=lambda found, header, _: results.append((found, header)),
                publish_stereo=lambda first, found, header, _: pairs.append((first, found)),
            )
        ]
        * cameras,
        problem=lambda kind, sentence: problems.append((kind, sentence)),
        trace=traces.append,
        statistics=statistics,
    )
    return SimpleNamespace(
        worker=worker, runtime=detector.runtime, statistics=statistics,
        results=results, pairs=pairs, problems=problems, traces=traces,
    )  # fmt: skip


@pytest.fixture
def work(tmp_path):
    """A worker with a real model."""
    detector = KeypointDetector.load(write_responsive_model(tmp_path), runtime='torch', threads=1)
    detector.runtime = Moody(detector.runtime)
    work = worker_of(detector, 1)
    yield work
    detector.runtime.goes_on.set()
    work.worker.stop(10)


@pytest.fixture
def stereo(tmp_path):
    """A worker for two cameras, whose images run at the same time."""
    detector = KeypointDetector.load(write_responsive_model(tmp_path), runtime='torch', threads=1)
    detector.runtime = Shared(detector.runtime)
    detector.runtime.dark_goes_on.set()
    work = worker_of(detector, 2)
    assert work.worker.pipeline.lanes == [range(1), range(1, 2)]
    yield work
    detector.runtime.dark_goes_on.set()
    work.worker.stop(10)


def arrival(pixels: np.ndarray, stamp: int = 0) -> Arrival:
    header = Header(frame_id='camera')
    header.stamp.sec = stamp
    return Arrival(SimpleNamespace(header=header, pixels=pixels), time.monotonic(), None)


def wait(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_worker_outlives_damage_and_failure(work, photographs):
    picture = photographs['coffee'][:96, :128]
    work.worker.submit(0, arrival(picture, 1))
    wait(lambda: len(work.results) == 1)
    work.worker.submit(0, arrival(picture.astype(np.float32), 2))
    wait(lambda: len(work.problems) == 1)
    for number, error in enumerate([RuntimeError('out of memory'), ValueError('our own')], 2):
        work.runtime.throws = error
        work.worker.submit(0, arrival(picture, 3))
        wait(lambda n=number: len(work.problems) == n)
    work.runtime.throws = None
    work.worker.submit(0, arrival(picture, 4))
    wait(lambda: len(work.results) == 2)
    assert [kind for kind, _ in work.problems] == ['damaged', 'failed', 'failed']
    assert 'must be uint8' in work.problems[0][1] and 'Traceback' not in work.problems[0][1]
    assert work.problems[1][1].startswith('RuntimeError: out of memory\nTraceback')
    assert work.problems[2][1].startswith('ValueError: our own\nTraceback')
    wait(lambda: work.statistics.counts()['processed'] == 2)
    counts = work.statistics.counts()
    assert (counts['damaged'], counts['failed'], counts['dropped']) == (1, 2, 0)
    assert 'frame 4000000000: waited' in work.traces[-1]


def test_worker_drops_and_resets_and_stops(work, photographs):
    picture = photographs['coffee'][:480, :600]
    for stamp in range(20):
        work.worker.submit(0, arrival(picture, stamp))
    wait(lambda: work.results and work.results[-1][1].stamp.sec == 19)
    wait(lambda: sum(work.statistics.counts().values()) == 40)  # each was received, too
    assert work.statistics.counts()['dropped'] > 0
    work.worker.reset()
    work.worker.submit(0, arrival(picture, 21))
    wait(lambda: work.results[-1][1].stamp.sec == 21)
    assert work.results[-1][0].previous is None
    assert work.worker.stop(10)
    assert 'asked for' in work.worker.pipeline.resets


def test_a_worker_that_hangs_is_not_stopped_and_goes_on(work, photographs):
    """Nor is another one started beside it, as the node asks before it goes on."""
    picture = photographs['coffee'][:96, :128]
    work.runtime.goes_on.clear()
    work.worker.submit(0, arrival(picture, 1))
    wait(lambda: work.worker.busy_since is not None)
    work.worker.submit(0, arrival(picture, 2))
    assert not work.worker.stop(0.2)
    work.runtime.goes_on.set()
    wait(lambda: len(work.results) == 2)  # the one that waited, too
    wait(lambda: work.worker.busy_since is None)
    assert work.worker.stop(10)


def submit(stereo, left: np.ndarray, right: np.ndarray, stamp: int) -> None:
    for camera, pixels in enumerate((left, right)):
        stereo.worker.submit(camera, arrival(pixels, stamp))


def test_lanes_find_what_a_batch_finds_and_keep_order(stereo, photographs):
    picture = photographs['coffee'][:96, :128]
    left, right = picture, np.roll(picture, 8, axis=1)
    for stamp in range(40):
        submit(stereo, left, right, stamp)
    wait(lambda: sum(stereo.statistics.counts().values()) == 160)  # each was received, too
    counts = stereo.statistics.counts()
    assert counts['processed'] + counts['dropped'] == 80
    assert counts['processed'] == 2 * len(stereo.pairs) == len(stereo.results)
    stamps = [first.frame.stamp for first, _ in stereo.pairs]
    assert stamps == sorted(stamps) and stamps[-1] == 39 * 10**9
    pipeline = Pipeline(stereo.worker.pipeline.detector, cameras=2)
    frames = [Frame(left, 0), Frame(right, 0)]
    expected, _ = pipeline.detect(frames, stereo.worker.settings)
    for first, second in stereo.pairs:
        assert first.frame.stamp == second.frame.stamp
        for found, wanted in zip((first, second), expected, strict=True):
            np.testing.assert_array_equal(found.features.keypoints, wanted.keypoints)
    assert stereo.worker.latest == [*stereo.pairs[-1]]
    stereo.worker.reset()
    submit(stereo, left, right, 41)
    wait(lambda: stereo.pairs[-1][0].frame.stamp == 41 * 10**9)
    assert all(result.previous is None for result in stereo.pairs[-1])
    assert stereo.worker.pipeline.resets['asked for'] == 2


def test_damage_and_failure_of_one_lane_add_up(stereo, photographs):
    picture = photographs['coffee'][:96, :128]
    dark = picture // 4
    submit(stereo, picture, picture.astype(np.float32), 1)
    wait(lambda: stereo.statistics.counts()['damaged'] == 2)
    assert [kind for kind, _ in stereo.problems] == ['damaged'] and not stereo.results
    stereo.runtime.dark_throws = RuntimeError('out of memory')
    submit(stereo, picture, dark, 2)
    wait(lambda: stereo.statistics.counts()['failed'] == 1)
    wait(lambda: stereo.statistics.counts()['processed'] == 1)
    assert len(stereo.results) == 1 and not stereo.pairs
    stereo.runtime.dark_throws = None
    submit(stereo, picture, dark, 3)
    wait(lambda: len(stereo.pairs) == 1)
    wait(lambda: stereo.statistics.counts()['processed'] == 3)
    counts = stereo.statistics.counts()
    assert counts['received'] == 6 and counts['dropped'] == 0


def test_a_lane_that_hangs_is_not_stopped_and_goes_on(stereo, photographs):
    picture = photographs['coffee'][:96, :128]
    stereo.runtime.dark_goes_on.clear()
    submit(stereo, picture, picture // 4, 1)
    wait(lambda: len(stereo.results) == 1)
    before = {stage.thread for stage in stereo.worker._stages}
    for stamp in (2, 3, 4):
        submit(stereo, picture, picture // 4, stamp)
    assert not stereo.worker.stop(0.3)
    assert stereo.worker.busy_since is not None
    hanging = before & {stage.thread for stage in stereo.worker._stages}
    assert hanging and len(stereo.worker._stages) == 4
    stereo.runtime.dark_goes_on.set()
    wait(lambda: stereo.pairs and stereo.pairs[-1][0].frame.stamp == 4 * 10**9)
    wait(lambda: sum(stereo.statistics.counts().values()) == 16)
    assert stereo.worker.stop(10)
    assert stereo.worker.busy_since is None and not stereo.problems


def test_shared_files_are_found():
    assert shared_file('config/keypoints.yaml') == ROOT / 'config' / 'keypoints.yaml'
    from kp2d_core.errors import FileError

    with pytest.raises(FileError, match='is not installed'):
        shared_file('config/absent.yaml')
