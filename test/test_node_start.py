"""How the keypoint node starts: its topics and parameters, and what is said where it cannot."""

import cv2
import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip('rclpy')

from robot import image_message, keypoint_node
from sensor_msgs.msg import CompressedImage, PointCloud2

from kp2d_core import KeypointDetector
from kp2d_ros.messages import keypoints_from_cloud


def test_started_with_compressed_transport_mask_and_parameter_file(
    robot, domain, model, tmp_path, picture
):
    mask = np.zeros(picture.shape[:2], np.uint8)
    mask[:, 80:] = 255
    cv2.imwrite(str(tmp_path / 'mask.png'), mask)
    file = tmp_path / 'parameters.yaml'
    text = (ROOT / 'config' / 'keypoints.yaml').read_text()
    file.write_text(text.replace('image_transport: raw', 'image_transport: compressed'))
    with keypoint_node(
        tmp_path / 'log',
        domain,
        model,
        '--params-file',
        str(file),
        mask=tmp_path / 'mask.png',
        nms_radios=3.0,
    ) as node:
        node.wait_for("there is no parameter 'nms_radios': it has no effect")
        node.wait_for('waiting for images on /kp2d/image/compressed')
        images = robot.publisher(CompressedImage, '/kp2d/image/compressed')
        heard = robot.listen(PointCloud2, '/kp2d/keypoints')
        data = cv2.imencode('.png', picture[..., ::-1])[1].tobytes()
        message = CompressedImage(format='png', data=data)
        message.header = image_message(picture, 5.0).header
        found = keypoints_from_cloud(robot.exchange(images, message, heard)).features
        detector = KeypointDetector.load(model, runtime='torch', threads=1)
        expected = detector.detect(picture, scales=(1,), mask=mask, max_keypoints=1000)
        np.testing.assert_array_equal(found.keypoints, expected.keypoints)
        assert len(found) > 50 and found.keypoints[:, 0].min() > 79


@pytest.mark.parametrize(
    ('remaps', 'topic'),
    [
        (['image:=/front/image'], '/front/image/compressed'),
        (['image:=/front/image', 'image/compressed:=/jpeg'], '/jpeg'),
    ],
)
def test_the_compressed_topic_goes_with_the_image(domain, model, tmp_path, remaps, topic):
    arguments = [part for remap in remaps for part in ('-r', remap)]
    with keypoint_node(
        tmp_path / 'log', domain, model, *arguments, image_transport='compressed'
    ) as node:
        node.wait_for(f'waiting for images on {topic}\n')


def test_a_model_that_is_not_there_is_named(domain, tmp_path):
    with keypoint_node(tmp_path / 'log', domain, tmp_path / 'absent.safetensors') as node:
        assert node.process.wait(60) == 1
        assert "there is no model '" in node.output and 'Traceback' not in node.output


def test_bad_parameters_at_the_start_are_named(domain, model, tmp_path):
    for number, (values, sentence) in enumerate([
        ({'verification': 'magic'}, 'verification must be one of auto'),
        ({'max_keypoints': 0}, 'max_keypoints'),
        ({'score_threshold': '.nan'}, 'score_threshold'),
        ({'nms_radius': 4}, '(write 4.0, not 4)'),
    ]):  # fmt: skip
        with keypoint_node(tmp_path / f'log{number}', domain, model, **values) as node:
            assert node.process.wait(60) == 2
            assert sentence in node.output and 'Traceback' not in node.output


def test_what_keeps_it_from_starting_is_said(domain, model, tmp_path):
    for number, (arguments, values, sentence) in enumerate(
        [
            ([], {'mask': tmp_path / 'none.png'}, 'cannot be configured: cannot read'),
            (['-r', 'camera_info:=image'], {}, 'cannot subscribe: '),
            (['--params-file', 'nowhere.yaml'], {}, 'nowhere.yaml'),
        ]
    ):
        with keypoint_node(tmp_path / f'log{number}', domain, model, *arguments, **values) as node:
            assert node.process.wait(20) in (1, 2)
            assert sentence in node.output and 'Traceback' not in node.output
