"""Two cameras: images paired by their stamps, matches between them, and the points they give."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip('rclpy')

from robot import image_message, keypoint_node
from sensor_msgs.msg import CameraInfo, Image, PointCloud2

from kp2d_core import KeypointDetector
from kp2d_core.camera import Camera
from kp2d_ros.clouds import read_points
from kp2d_ros.messages import keypoints_from_cloud
from kp2d_ros.outputs import STEREO_DTYPE
from kp2d_ros.pipeline import Frame, Pipeline
from kp2d_ros.settings import Settings, check_cameras
from kp2d_ros.stereo import WAITING, Pairing, baseline_of, match_stereo

# Of the motorcycle, as scikit-image's documentation has it: pixels, metres, and by how much the
# principal point of the right image lies further to the right.
FOCAL, BASELINE, OFFSET = 994.978, 0.193001, 31.086
SIZE = (741, 500)
K = {
    side: [FOCAL, 0, 311.193 + offset, 0, FOCAL, 254.877, 0, 0, 1]
    for side, offset in (('left', 0.0), ('right', OFFSET))
}


def test_images_are_paired_by_their_stamps():
    pairing: Pairing[str] = Pairing(2)
    assert pairing.add(0, 100, 'left 100', 5) == (None, 0)
    assert pairing.add(0, 200, 'left 200', 5) == (None, 0)
    assert pairing.add(1, 203, 'right 203', 5) == (['left 200', 'right 203'], 1)  # 100 is gone
    assert pairing.add(1, 299, 'right 299', 5) == (None, 0)
    assert pairing.add(1, 310, 'right 310', 5) == (None, 0)
    assert pairing.add(0, 300, 'left 300', 5) == (['left 300', 'right 299'], 0)
    assert pairing.add(0, 309, 'left 309', 5) == (['left 309', 'right 310'], 0)
    gone = sum(pairing.add(0, 1000 + 100 * number, '', 5)[1] for number in range(WAITING + 3))
    assert gone == 3


def test_names_of_cameras_are_names_of_topics():
    check_cameras([''])
    check_cameras(['left', 'right_2'])
    for wrong in ([], ['left', ''], ['left', 'left'], ['a b'], ['/left'], ['9'], [*'abcdefghi']):
        with pytest.raises(ValueError, match='different names of topics'):
            check_cameras(wrong)


@pytest.fixture(scope='module')
def results(photographs):
    pipeline = Pipeline(KeypointDetector.load('small', threads=2), cameras=2)
    images = [photographs[f'motorcycle_{side}'] for side in ('left', 'right')]
    assert images[0].shape[:2] == SIZE[::-1]
    frames = [
        Frame(image, 0, camera=Camera.create(SIZE, K[side]), baseline=baseline)
        for image, side, baseline in zip(images, K, (0.0, BASELINE), strict=True)
    ]
    settings = Settings(max_keypoints=800)
    return pipeline.follow(frames, *pipeline.detect(frames, settings), settings)


def test_a_calibrated_pair_gives_points_in_metres(results):
    """Against the depth that was measured with structured light."""
    import skimage.data

    truth = np.load(Path(skimage.data.__file__).parent / 'motorcycle_disp.npz')['arr_0']
    left, right = results
    matches = match_stereo(left, right, Settings())
    assert matches.inliers.sum() > 200
    pixels = left.features.keypoints[matches.indices[matches.inliers, 0]]
    column, row = np.rint(pixels).astype(int).T
    disparity = truth[row, column]
    known = np.isfinite(disparity) & (disparity > 0)
    depth = FOCAL * BASELINE / (disparity + OFFSET)
    points = matches.points[matches.inliers]
    ratio = points[known, 2] / depth[known]
    assert known.sum() > 150 and abs(np.median(ratio) - 1) < 0.01
    assert (abs(ratio - 1) < 0.05).mean() > 0.85
    rays = left.rays[matches.indices[matches.inliers, 0]]
    seen = np.isfinite(points[:, 2])
    np.testing.assert_allclose(points[seen, :2] / points[seen, 2:], rays[seen], atol=1e-5)
    assert np.isnan(matches.points[~matches.inliers]).all()


def test_without_a_calibration_the_geometry_is_estimated(results):
    from dataclasses import replace

    left, right = (replace(r, frame=replace(r.frame, camera=None)) for r in results)
    matches = match_stereo(left, right, Settings())
    first, second = matches.indices[matches.inliers].T
    rows = left.features.keypoints[first, 1] - right.features.keypoints[second, 1]
    assert len(first) > 200 and (abs(rows) < 3).mean() > 0.95
    assert np.isnan(matches.points).all()


def test_a_batch_gives_what_single_images_give(results, photographs):
    detector = KeypointDetector.load('small', threads=2)
    for result, side in zip(results, K, strict=True):
        alone = detector.detect(
            photographs[f'motorcycle_{side}'], scales=(1,), max_keypoints=800,
            score_threshold=Settings().score_threshold,
        )  # fmt: skip
        assert len(result.features) == len(alone)
        apart = np.abs(result.features.keypoints[:, None] - alone.keypoints).sum(2).min(1)
        assert (apart < 0.1).mean() > 0.98


def test_one_node_for_two_cameras(robot, domain, model, tmp_path, photographs):
    def info(side: str) -> CameraInfo:
        baseline = BASELINE if side == 'right' else 0.0
        message = CameraInfo(width=160, height=120, distortion_model='plumb_bob', d=[0.0] * 5)
        message.k = [float(value) for value in K[side]]
        message.p = [*message.k[:3], -FOCAL * baseline, *message.k[3:6], 0.0, *message.k[6:], 0.0]
        return message

    assert baseline_of(info('right').p) == pytest.approx(BASELINE)
    cut = {side: photographs[f'motorcycle_{side}'][100:220, 200:360] for side in K}
    with keypoint_node(
        tmp_path / 'log', domain, model, cameras='[left, right]', max_keypoints=150
    ) as node:
        node.wait_for('waiting for images on /kp2d/left/image')
        images = {side: robot.publisher(Image, f'/kp2d/{side}/image') for side in K}
        infos = {side: robot.publisher(CameraInfo, f'/kp2d/{side}/camera_info') for side in K}
        heard = {side: robot.listen(PointCloud2, f'/kp2d/{side}/keypoints') for side in K}
        pairs = robot.listen(PointCloud2, '/kp2d/right/stereo_matches')
        stamps = iter(np.arange(1.0, 100.0, 0.1))

        def publish(apart: float = 0.0) -> float:
            stamp = next(stamps)
            for number, side in enumerate(K):
                infos[side].publish(info(side))
                images[side].publish(image_message(cut[side], stamp + number * apart))
            return stamp

        def both() -> bool:
            publish(0.001)
            robot.spin(0.3)
            return bool(pairs) and all(heard.values())

        robot.wait(both, 'keypoints of both and matches between them')
        robot.wait(lambda: len(heard['left']) == len(heard['right']), 'as many of both')
        publish(0.001)
        robot.wait(
            lambda: (
                pairs[-1].header.stamp == heard['left'][-1].header.stamp
                and keypoints_from_cloud(heard['left'][-1]).track_ages.max() >= 1
            ),
            'tracks',
        )
        points = read_points(pairs[-1])
        assert points.dtype.names == STEREO_DTYPE.names
        left = keypoints_from_cloud(heard['left'][-1])
        np.testing.assert_array_equal(points['track_id'], left.track_ids[points['index']])
        np.testing.assert_array_equal(points['u'], left.features.keypoints[points['index'], 0])
        # Too far apart to belong together.
        counted, first = robot.count('unpaired'), publish(0.02)
        for _ in range(12):
            publish(0.02)
            robot.spin(0.02)
        robot.wait(lambda: robot.count('unpaired') > counted, 'images without a partner')
        newest = max(cloud.header.stamp.sec + cloud.header.stamp.nanosec / 1e9 for cloud in pairs)
        assert newest < first
        assert 'Traceback' not in node.output


def test_under_load_pairs_stay_whole_and_in_order(robot, domain, model, tmp_path, photographs):
    """Images come faster than they can be processed."""
    with keypoint_node(
        tmp_path / 'log', domain, model, cameras='[left, right]', max_keypoints=150
    ) as node:
        node.wait_for('waiting for images on /kp2d/left/image')
        images = {side: robot.publisher(Image, f'/kp2d/{side}/image') for side in K}
        heard = {side: robot.listen(PointCloud2, f'/kp2d/{side}/keypoints') for side in K}
        pairs = robot.listen(PointCloud2, '/kp2d/right/stereo_matches')
        seconds = iter(range(1, 1000))

        def publish() -> None:
            stamp = next(seconds) / 10
            for side in K:
                picture = photographs[f'motorcycle_{side}'][:480, :640]
                images[side].publish(image_message(picture, stamp))

        def stamps(clouds: list[PointCloud2]) -> list[tuple[int, int]]:
            return [(cloud.header.stamp.sec, cloud.header.stamp.nanosec) for cloud in clouds]

        def answered() -> bool:
            publish()
            robot.spin(0.3)
            return bool(pairs) and all(heard.values())

        robot.wait(answered, 'keypoints of both and matches between them')
        for _ in range(60):
            publish()
            robot.spin(0.01)

        def settled() -> bool:
            figures = robot.figures()
            others = ('processed', 'dropped', 'skipped', 'unpaired')
            counts = [int(figures[f'frames {name}']) for name in ('received', *others)]
            return counts[0] == sum(counts[1:])

        robot.wait(settled, 'counts that add up')
        robot.spin(0.5)
        assert robot.count('dropped') > 0
        for clouds in (*heard.values(), pairs):
            assert stamps(clouds) == sorted(set(stamps(clouds)))
        assert len(set(stamps(heard['left'])) ^ set(stamps(heard['right']))) <= 2
        assert len(pairs) >= len(heard['left']) - 2
        assert 'Traceback' not in node.output
