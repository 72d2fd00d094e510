"""The path of a frame through a real node, from image message to keypoints, by file."""

import os
import sys
import threading
import time
from itertools import groupby

import pytest
from conftest import ROOT

pytest.importorskip('rclpy')

import rclpy
from rclpy.executors import SingleThreadedExecutor
from robot import new_domain
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_msgs.msg import Header

from kp2d_ros.bridge import image_message
from kp2d_ros.camera.moving_view import MovingView, default_photograph
from kp2d_ros.keypoint_node import KeypointNode

# In the order of their first step, as in CONTRIBUTING.md.
WAY = (
    'kp2d_ros/inputs.py',
    'kp2d_ros/pipeline.py',
    'kp2d_core/images.py',
    'kp2d_core/features.py',
    'kp2d_core/runtimes/base.py',
    'kp2d_core/tracking.py',
    'kp2d_core/camera.py',
    'kp2d_core/matching.py',
    'kp2d_core/verification.py',
    'kp2d_ros/outputs.py',
)
# Steps of the path, as opposed to properties of a value (`len(features)`, `frame.size`).
VALUES = ('Features.', 'Matches.', 'Camera.', 'Frame.', 'Known.', 'LateDescriptors.')
# Code that runs besides the frame: timers, and messages other than images.
BESIDE = ('Input._look_at_graph', 'Input._camera_info_arrived', 'KeypointNode._report')
SIZE = (320, 240)


class Trace:
    """Calls from one of our files into another, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[tuple[str, str]] = []  # file, function

    def __call__(self, frame, event, argument) -> None:
        file = frame.f_code.co_filename
        if not self.on or event != 'call' or not self.ours(file):
            return
        above, names = frame.f_back, {frame.f_code.co_qualname}
        caller = ''
        while above is not None:
            if self.ours(above.f_code.co_filename):
                caller = caller or above.f_code.co_filename
                names.add(above.f_code.co_qualname)
            above = above.f_back
        if caller != file and names.isdisjoint(BESIDE):
            self.steps.append((os.path.relpath(file, ROOT), frame.f_code.co_qualname))

    @staticmethod
    def ours(file: str) -> bool:
        return file.startswith((f'{ROOT}/kp2d_core/', f'{ROOT}/kp2d_ros/'))


@pytest.fixture
def trace():
    traced = Trace()
    threading.setprofile(traced)  # for the node's threads, which start later
    sys.setprofile(traced)
    yield traced
    sys.setprofile(None)
    threading.setprofile(None)


def test_a_frame_goes_one_way_through_ten_files(trace):
    pytest.importorskip('openvino')
    context = rclpy.Context()
    context.init(args=['', '--ros-args', '-p', 'image_size:=320x240'], domain_id=new_domain())
    node = KeypointNode(context=context)
    camera = rclpy.create_node('camera', context=context, namespace='/kp2d')
    images = camera.create_publisher(Image, 'image', 1)
    infos = camera.create_publisher(CameraInfo, 'camera_info', 1)
    heard: dict[str, int] = {}
    for topic in ('keypoints', 'matches'):
        camera.create_subscription(
            PointCloud2, topic, lambda cloud, t=topic: heard.update({t: cloud.header.stamp.sec}), 2
        )
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(node)
    executor.add_node(camera)

    def spin(until) -> None:
        end = time.monotonic() + 60
        while not until():
            assert time.monotonic() < end
            executor.spin_once(timeout_sec=0.05)

    k = [300.0, 0.0, 160.0, 0.0, 300.0, 120.0, 0.0, 0.0, 1.0]
    info = CameraInfo(width=320, height=240, distortion_model='plumb_bob', k=k)
    info.d = [0.05, -0.02, 0.0, 0.0, 0.0]
    try:
        spin(lambda: images.get_subscription_count() and infos.get_subscription_count())
        spin(lambda: node.count_subscribers('/kp2d/keypoints') == 1)
        pictures = MovingView(default_photograph(), SIZE).pictures()
        for stamp in range(1, 6):
            infos.publish(info)
            spin(lambda: node._inputs[0].camera is not None)
            message = image_message(Header(), next(pictures).image, 'rgb8')
            message.header.stamp.sec = stamp
            trace.on = stamp == 5  # the ones before it have compiled and set up everything
            images.publish(message)
            spin(
                lambda s=stamp: heard.get('keypoints') == s and heard.get('matches', 1) == s
                and node.statistics.counts()['processed'] >= s
            )  # fmt: skip
            trace.on = False
        assert node._worker.latest[0].verified_by == 'essential'
    finally:
        node.destroy_node()
        camera.destroy_node()
        executor.shutdown()
        context.try_shutdown()

    steps = [(file, name) for file, name in trace.steps if 'test_' not in file]
    steps = [step for step in steps if step[1] != 'Statistics.counts']  # this test's own
    assert {file for file, _ in steps} == set(WAY), steps
    # Calibrations are values; turning pixels into rays is a step.
    line = [f for f, name in steps if name == 'Camera.rays' or not name.startswith(VALUES)]
    # The helper thread of matching enters the file that it belongs to.
    assert [file for file, _ in groupby(line)] == list(WAY), steps
