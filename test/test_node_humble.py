"""The nodes with a stand-in for Humble's rclpy, which lacks what was added since."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip('rclpy')

from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParameters
from robot import Process
from sensor_msgs.msg import PointCloud2

from kp2d_ros.startup import NODES

HERE = Path(__file__).parent


def test_the_stand_in_lacks_what_humble_lacks():
    code = """
import humble; humble.pretend()
from rclpy.node import Node
from rclpy.subscription import Subscription
for name in ('clock_type', 'event_handler'):
    try:
        __import__(f'rclpy.{name}')
    except ImportError:
        print(name)
print(hasattr(Node, 'add_post_set_parameters_callback'))
print(hasattr(Subscription, 'get_publisher_count'), hasattr(Subscription, 'CallbackType'))
"""
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, cwd=HERE, timeout=60
    )
    assert done.stdout.split() == ['clock_type', 'event_handler', 'False', 'False', 'False']


def test_camera_and_node_work_as_elsewhere(robot, domain, model, tmp_path):
    def start(name: str, **parameters) -> Process:
        given = [part for k, v in parameters.items() for part in ('-p', f'{k}:={v}')]
        remap = ['-r', 'image:=/camera/image_raw', '-r', 'camera_info:=/camera/camera_info']
        return Process(
            tmp_path / name, str(HERE / 'humble.py'), NODES[name], '--ros-args', *given, *remap,
            domain=domain,
        )  # fmt: skip

    with (
        start('camera_node', width=160, height=120, rate=20.0) as camera,
        start(
            'keypoint_node', model=model, runtime='torch', threads=1, diagnostics_period=0.2
        ) as node,
    ):
        heard = robot.listen(PointCloud2, '/kp2d/keypoints')
        robot.wait(lambda: len(heard) >= 3, 'keypoints')
        request = SetParameters.Request()
        value = ParameterValue(type=ParameterType.PARAMETER_INTEGER, integer_value=17)
        request.parameters = [Parameter(name='max_keypoints', value=value)]
        name = '/kp2d/keypoint_node/set_parameters'
        assert robot.call(SetParameters, name, request).results[0].successful
        robot.wait(lambda: heard[-1].width == 17, 'what the parameter changes')
        value.integer_value = -1
        assert not robot.call(SetParameters, name, request).results[0].successful
        robot.wait(lambda: ' Hz' in robot.status().message, 'a node that is well')
        figures = robot.figures()
        assert figures['frames lost'] == figures['frames failed'] == '0'  # lost: it cannot tell
        for process in (node, camera):
            assert process.stop()[0] == 0, process.output
            assert 'Traceback' not in process.output
