"""From frame to result without ROS: tracks, when they restart, calibrated geometry."""

import threading
import time
from dataclasses import replace

import cv2
import numpy as np
import pytest
from models import write_responsive_model

from kp2d_core import Features, KeypointDetector, Tracks
from kp2d_core.camera import Camera, Info, camera_from_info, pinhole_info, uncalibrated_info
from kp2d_core.matching import no_matches
from kp2d_ros.camera.moving_view import drawn_photograph
from kp2d_ros.overlay import LASTED, LONGEST, OLD, PALETTE, Overlay, shades_of, to_jpeg
from kp2d_ros.pipeline import Frame, Pipeline, Result
from kp2d_ros.settings import Settings

SIZE = (160, 120)
SETTINGS = Settings(max_keypoints=150)
PLAIN = Settings(max_keypoints=150, nms_radius=0.0)


@pytest.fixture(scope='module')
def detector(tmp_path_factory) -> KeypointDetector:
    model = write_responsive_model(tmp_path_factory.mktemp('model'))
    return KeypointDetector.load(model, runtime='torch', threads=1)


@pytest.fixture(scope='module')
def views() -> list[np.ndarray]:
    """A camera that moves by whole cells: even an untrained network follows that."""
    photograph = drawn_photograph(480, 360)
    return [photograph[100:220, 8 * step : 8 * step + 160].copy() for step in range(6)]


def frame(image: np.ndarray, seconds: float, **other: object) -> Frame:
    return Frame(image, round(seconds * 1e9), 'camera', **other)


def test_result_is_the_cores(detector, views):
    result = Pipeline(detector).process(frame(views[0], 0), SETTINGS)
    expected = detector.detect(views[0], scales=(1,), max_keypoints=150)
    np.testing.assert_array_equal(result.features.keypoints, expected.keypoints)
    np.testing.assert_array_equal(result.features.descriptors, expected.descriptors)
    assert result.previous is None and len(result.tracks.matches) == 0
    assert 0 < result.inference_time <= result.total_time


def test_tracks_go_on_and_matches_point_at_the_previous_frame(detector, views):
    pipeline = Pipeline(detector)
    first = pipeline.process(frame(views[0], 0.0), SETTINGS)
    second = pipeline.process(frame(views[1], 0.1), SETTINGS)
    matches = second.tracks.matches
    assert len(matches) > 20
    before, now = matches.indices[matches.inliers].T
    np.testing.assert_array_equal(second.tracks.ids[now], first.tracks.ids[before])
    assert second.previous.features is first.features
    assert second.previous.frame.stamp == first.frame.stamp
    assert second.previous.previous is None  # no chain that grows for ever


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        ({'image': 'smaller'}, 'image size changed'),
        ({'frame_id': 'other'}, 'frame_id changed'),
        ({'stamp': 0}, 'time went backwards'),
        ({'stamp': 60 * 10**9}, 'gap between frames'),
        ({'camera': Camera(*SIZE, (100, 0, 80, 0, 100, 60, 0, 0, 1))}, 'calibration changed'),
    ],
)
def test_tracks_begin_anew_where_they_must(detector, views, change, reason):
    if 'image' in change:
        change = {'image': views[1][:96]}
    pipeline = Pipeline(detector)
    first = pipeline.process(frame(views[0], 1.0), SETTINGS)
    result = pipeline.process(replace(frame(views[1], 1.1), **change), SETTINGS)
    assert pipeline.resets == {reason: 1}
    assert result.previous is None and len(result.tracks.matches) == 0
    assert (result.tracks.ages == 0).all()
    assert result.tracks.ids.min() > first.tracks.ids.max()


def test_a_frame_of_the_same_time_and_gray_ones_go_on(detector, views):
    pipeline = Pipeline(detector)
    pipeline.process(frame(views[0], 1.0), SETTINGS)
    pipeline.process(frame(views[0], 1.0), SETTINGS)
    pipeline.process(frame(views[0][..., 1], 1.1), SETTINGS)
    assert pipeline.resets == {}


def test_a_camera_at_rest_keeps_its_tracks(detector, views):
    """No motion has no epipolar geometry; the points are still the same points."""
    pipeline = Pipeline(detector)
    for number in range(4):
        result = pipeline.process(frame(views[0], number / 10), SETTINGS)
    assert (result.tracks.ages == 3).mean() > 0.95


def test_tracking_can_be_switched(detector, views):
    pipeline = Pipeline(detector)
    off = replace(SETTINGS, track=False)
    pipeline.process(frame(views[0], 0.0), SETTINGS)
    assert pipeline.process(frame(views[1], 0.1), off).tracks is None
    result = pipeline.process(frame(views[2], 0.2), SETTINGS)
    assert result.previous is None and pipeline.resets == {'tracking switched on': 1}


def test_settings_reach_the_core(detector, views):
    pipeline = Pipeline(detector)
    assert len(pipeline.process(frame(views[0], 0), Settings(max_keypoints=7)).features) == 7
    spread = pipeline.process(frame(views[0], 0), replace(SETTINGS, nms_radius=12.0)).features
    distances = np.linalg.norm(spread.keypoints[:, None] - spread.keypoints, axis=2)
    assert distances[~np.eye(len(spread), dtype=bool)].min() >= 12
    small = pipeline.process(frame(views[0], 0), replace(SETTINGS, working_size=80)).features
    expected = detector.detect(views[0], working_size=80, scales=(1,), max_keypoints=150)
    np.testing.assert_array_equal(small.keypoints, expected.keypoints)
    scaled = pipeline.process(frame(views[0], 0), replace(SETTINGS, scales=(1, 0.5))).features
    expected = detector.detect(views[0], scales=(1, 0.5), max_keypoints=150)
    np.testing.assert_array_equal(scaled.keypoints, expected.keypoints)
    mask = np.zeros((120, 160), np.uint8)
    mask[:, :80] = 255
    masked = Pipeline(detector, mask).process(frame(views[0], 0), SETTINGS).features
    assert len(masked) and masked.keypoints[:, 0].max() <= 80


def second_of(detector, views, **changes) -> Result:
    """The result of the second of two frames that are 8 px apart."""
    pipeline, settings = Pipeline(detector), replace(SETTINGS, **changes)
    pipeline.process(frame(views[0], 0.0), settings)
    return pipeline.process(frame(views[1], 0.5), settings)


def test_settings_of_matching_reach_the_core(detector, views):
    usual = second_of(detector, views).tracks.matches
    assert len(usual) > 20 and usual.distances.max() > 0.1
    result = second_of(detector, views, search_radius=7.0, verification='none')
    before, now = result.tracks.matches.indices.T
    moved = result.features.keypoints[now] - result.previous.features.keypoints[before]
    assert np.hypot(*moved.T).max() <= 7.01
    near = second_of(detector, views, match_distance=0.1).tracks.matches
    assert 0 < len(near) < len(usual) and near.distances.max() <= 0.1
    assert len(second_of(detector, views, match_ratio=0.5).tracks.matches) < len(usual)
    flat = second_of(detector, views, verification='homography')
    assert flat.verified_by == 'homography' and flat.tracks.matches.model is not None
    strict = second_of(detector, views, verification='homography', verification_threshold=0.01)
    assert strict.tracks.matches.inliers.sum() < flat.tracks.matches.inliers.sum()
    assert second_of(detector, views, max_gap=0.4).previous is None
    assert second_of(detector, views, max_gap=0.6).previous is not None


@pytest.mark.parametrize('max_missed', [0, 1])
def test_how_long_a_track_is_waited_for(detector, views, max_missed):
    pipeline, settings = Pipeline(detector), replace(SETTINGS, max_missed=max_missed)
    black = np.zeros_like(views[0])
    seen = [
        pipeline.process(frame(image, 0.1 * n), settings).tracks
        for n, image in enumerate([views[0], views[0], black, views[0]])
    ]
    back = np.isin(seen[3].ids, seen[1].ids).mean()
    assert (back > 0.5) == (max_missed > 0), back


class Slow:
    """A runtime whose compiler waits to be let go on; torch itself compiles nothing."""

    def __init__(self, runtime) -> None:
        self._runtime, self.goes_on, self.asked = runtime, threading.Event(), []

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def prepare(self, shape, top_k):
        self.asked.append((shape, top_k))
        if not self.goes_on.wait(30):
            raise RuntimeError('it was never let go on')


def test_settings_wait_for_the_compiler_and_frames_do_not(detector, views):
    slow = KeypointDetector(Slow(detector.runtime))
    slow.runtime.goes_on.set()
    pipeline = Pipeline(slow, in_background=True)
    assert len(pipeline.process(frame(views[0], 0.0), PLAIN).features) == 150
    slow.runtime.goes_on.clear()
    more = replace(PLAIN, max_keypoints=200)
    for number in range(3):
        result = pipeline.process(frame(views[0], 0.1 * number), more)
        assert len(result.features) == 150 and '200 keypoints' in pipeline.compiler.preparing
    fewer = pipeline.process(frame(views[0], 0.4), replace(PLAIN, max_keypoints=20))
    assert len(fewer.features) == 20  # takes no compiler
    slow.runtime.goes_on.set()
    end = time.monotonic() + 30
    while len(pipeline.process(frame(views[0], 0.5), more).features) < 200:
        assert time.monotonic() < end
    assert pipeline.compiler.preparing == '' and pipeline.resets == {}
    assert slow.runtime.asked.count(((1, 120, 160, 3), 200)) == 1


def test_settings_that_cannot_be_compiled_leave_the_old_ones_in_use(detector, views):
    class Short(Slow):
        def prepare(self, shape, top_k):
            if top_k > 150:
                raise RuntimeError('out of memory')

    pipeline = Pipeline(KeypointDetector(Short(detector.runtime)), in_background=True)
    pipeline.process(frame(views[0], 0.0), PLAIN)
    more = replace(PLAIN, max_keypoints=200)
    end = time.monotonic() + 30
    while 'out of memory' not in pipeline.compiler.problem:
        assert len(pipeline.process(frame(views[0], 0.1), more).features) == 150
        assert time.monotonic() < end
    assert len(pipeline.process(frame(views[0], 0.2), more).features) == 150
    with pytest.raises(RuntimeError, match='cannot be compiled for 160x96 images'):
        pipeline.process(frame(views[0][:96], 0.3), more)


def test_tracks_survive_intrinsics_that_drift(detector, views):
    def camera(focal: float) -> Camera:
        return Camera(*SIZE, (focal, 0, 80, 0, focal, 60, 0, 0, 1))

    pipeline = Pipeline(detector)
    for number, focal in enumerate([150, 150.4, 151, 149, 148.5]):
        result = pipeline.process(frame(views[0], number / 10, camera=camera(focal)), SETTINGS)
    assert pipeline.resets == {} and (result.tracks.ages == 4).mean() > 0.9
    np.testing.assert_allclose(
        result.rays * 148.5 + [80, 60], result.features.keypoints, atol=1e-3
    )
    pipeline.process(frame(views[0], 0.6, camera=camera(170)), SETTINGS)
    assert pipeline.resets == {'calibration changed': 1}


def test_an_unusable_image_changes_nothing(detector, views):
    pipeline = Pipeline(detector)
    pipeline.process(frame(views[0], 0.0), SETTINGS)
    with pytest.raises(ValueError, match='too small'):
        pipeline.process(frame(views[0][:8], 0.1), SETTINGS)
    result = pipeline.process(frame(views[1], 0.2), SETTINGS)
    assert result.previous is not None and pipeline.resets == {}


def test_geometry_follows_the_calibration(detector, views):
    intrinsics = np.array([[160, 0, 79.5], [0, 160, 59.5], [0, 0, 1.0]])
    camera = camera_from_info(pinhole_info(SIZE, intrinsics))
    pipeline = Pipeline(detector)
    pipeline.process(frame(views[0], 0.0, camera=camera), SETTINGS)
    result = pipeline.process(frame(views[1], 0.1, camera=camera), SETTINGS)
    assert result.verified_by == 'essential'
    essential = result.tracks.matches.model
    values = np.linalg.svd(essential)[1]
    np.testing.assert_allclose(values / values[0], [1, 1, 0], atol=1e-6)
    assert Pipeline(detector).process(frame(views[0], 0), SETTINGS).verified_by == 'fundamental'
    other = replace(camera, width=640, height=480)
    result = Pipeline(detector).process(
        frame(views[0], 0, camera=other), replace(SETTINGS, verification='essential')
    )
    assert result.verified_by == 'fundamental'


def test_a_search_radius_is_in_pixels_of_the_image_whatever_the_lens(detector, views):
    k = (40.0, 0, 79.5, 0, 40, 59.5, 0, 0, 1)
    camera = camera_from_info(Info(*SIZE, k, (0.0,) * 4, distortion_model='equidistant'))
    pipeline, settings = Pipeline(detector), replace(SETTINGS, search_radius=9.0)
    pipeline.process(frame(views[0], 0.0, camera=camera), settings)
    result = pipeline.process(frame(views[1], 0.1, camera=camera), settings)
    assert result.verified_by == 'essential'
    expected = second_of(detector, views, search_radius=9.0).tracks.matches
    np.testing.assert_array_equal(result.tracks.matches.indices, expected.indices)


def test_without_a_calibration_rays_are_nominal(detector, views):
    result = Pipeline(detector).process(frame(views[0], 0), SETTINGS)
    assert not result.calibrated and camera_from_info(uncalibrated_info(SIZE)) is None
    expected = (result.features.keypoints - [79.5, 59.5]) / 160  # the longer side
    np.testing.assert_allclose(result.rays, expected, atol=1e-6)
    camera = Camera.create(SIZE, [[200, 0, 80], [0, 210, 60], [0, 0, 1]])
    result = Pipeline(detector).process(frame(views[0], 0, camera=camera), SETTINGS)
    assert result.calibrated and result.rays.dtype == np.float32
    expected = (result.features.keypoints - [80, 60]) / [200, 210]
    np.testing.assert_allclose(result.rays, expected, atol=1e-6)


def coloured(canvas: np.ndarray) -> np.ndarray:
    return (canvas.max(axis=2).astype(int) - canvas.min(axis=2)) > 30


def test_tails_of_a_fast_camera_are_short():
    """Of tracks that move by 30 pixels a frame: whole ones would cross each other all over."""
    gray, overlay = np.full((480, 640), 128, np.uint8), Overlay()
    for number in range(12):
        here = np.array([[60 + 30 * number, 200]], np.float32)
        features = Features(here, np.ones(1, np.float32), np.ones((1, 4), np.float32), (640, 480))
        tracks = Tracks(np.array([7]), np.array([number]), no_matches())
        result = Result(frame(gray, number), features, tracks, None, here, False, 'none', 0, 0)
        canvas = overlay.draw(replace(result, previous=result if number else None), '')
    columns = np.flatnonzero(coloured(canvas).any(axis=0))
    assert here[0, 0] - LONGEST * 640 - 1 < columns.min() < here[0, 0] - 50


def test_overlay_draws_tracks_that_lasted(detector, views):
    pipeline, overlay = Pipeline(detector), Overlay()
    for number in range(2 * LASTED):
        gray = views[number][..., 1]
        result = pipeline.process(frame(gray, number / 10), SETTINGS)
        canvas = overlay.draw(result, '')
        if number < LASTED:  # gray: of no track is known yet whether it lasts
            assert not coloured(canvas).any()
    assert canvas.shape == (240, 320, 3)  # of 160x120
    x, y = np.rint(2 * result.features.keypoints + 0.5).astype(int).T
    seen = (x >= 0) & (y >= 0) & (x < 320) & (y < 240)
    lasted = result.tracks.ages >= LASTED
    assert (seen & lasted).sum() > 10
    assert coloured(canvas)[y[seen & lasted], x[seen & lasted]].mean() > 0.95
    without_tails = Overlay().draw(result, '')
    assert coloured(canvas).sum() > coloured(without_tails).sum()
    assert not coloured(overlay.draw(replace(result, tracks=None), '')).any()
    assert to_jpeg(canvas)[:2] == b'\xff\xd8'
    wide = np.asarray(cv2.resize(gray, (640, 480)))
    nothing = replace(result, frame=frame(wide, 0), features=result.features[:0], tracks=None)
    plain = overlay.draw(nothing, '')
    assert plain.shape == (480, 640, 3)
    np.testing.assert_allclose(plain[..., 0], 0.82 * wide, atol=1)
    captioned = overlay.draw(replace(result, frame=frame(wide, 0)), '9 Hz')
    legend = captioned[-14:, :300].reshape(-1, 3).tolist()
    assert all(list(colour) in legend for colour in PALETTE)


def test_colours_of_ages():
    ages = np.array([0, LASTED, 8, 20, OLD, 10 * OLD])
    shades = shades_of(ages)
    assert shades[0] == shades[1] == 0 and shades[-1] == shades[-2] == len(PALETTE) - 1
    assert (np.diff(shades[1:5]) > 0).all()


def test_matches_are_refined_while_that_is_on(detector):
    """Moved by parts of a pixel: an untrained network's points hardly follow, aligned ones do."""
    photograph = drawn_photograph(480, 360)
    ways = [np.array([[1, 0, -x], [0, 1, -100.0]]) for x in (40.0, 41.3, 42.6)]
    views = [cv2.warpAffine(photograph, way, SIZE, flags=cv2.INTER_CUBIC) for way in ways]
    refining = replace(SETTINGS, refine_matches=True, verification='none')
    pipeline, seen = Pipeline(detector), []
    for number, view in enumerate(views):
        seen.append(pipeline.process(frame(view, number / 10), refining))
        matches = seen[-1].tracks.matches
        if number:
            before, now = matches.indices[matches.inliers].T
            way = seen[-1].features.keypoints[now] - seen[-2].features.keypoints[before]
            assert len(way) > 15
            assert np.median(way, axis=0) == pytest.approx([-1.3, 0], abs=0.1)
            np.testing.assert_array_equal(seen[-1].rays.shape, seen[-1].features.keypoints.shape)
    off = pipeline.process(frame(views[2], 0.3), replace(refining, refine_matches=False))
    expected = detector.detect(views[2], scales=(1,), max_keypoints=150)
    np.testing.assert_array_equal(off.features.keypoints, expected.keypoints)
