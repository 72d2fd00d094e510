"""The launch file: what it declares, and what it starts where launch is installed."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from models import write_responsive_model

from kp2d_ros.startup import NODES

FILE = ROOT / 'launch' / 'keypoints.launch.py'
DOCUMENTED = (
    'image', 'camera_info', 'namespace', 'params_file', 'image_transport', 'model', 'runtime',
    'precision', 'threads', 'size', 'max_keypoints', 'managed', 'use_sim_time', 'camera',
    'source', 'local', 'debug',
)  # fmt: skip


def test_it_compiles_and_declares_what_is_documented():
    """Without launch: from its syntax tree."""
    tree = ast.parse(FILE.read_text())
    declared = [
        call.args[0].value
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, 'id', '') == 'DeclareLaunchArgument'
        and isinstance(call.args[0], ast.Constant)
    ]
    table = next(
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == 'PARAMETERS'
    )  # fmt: skip
    declared += [key.value for key in table.keys]
    assert sorted(declared) == sorted(DOCUMENTED)
    documentation = (ROOT / 'docs' / 'node.md').read_text()
    section = documentation.split('## Launch')[1].split('\n## ')[0]
    assert sorted(re.findall(r'^\| `(\w+)` ', section, re.MULTILINE)) == sorted(DOCUMENTED)


def test_its_arguments_are_parameters_of_the_node():
    pytest.importorskip('rclpy')
    from kp2d_ros.settings import TABLE

    tree = ast.parse(FILE.read_text())
    table = next(
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == 'PARAMETERS'
    )  # fmt: skip
    for row in table.values:
        name, kind, _ = row.elts
        if name.value == 'use_sim_time':  # every node has it
            continue
        assert type(TABLE[name.value].default).__name__ == kind.id


@pytest.fixture
def prefix(tmp_path) -> Path:
    """An installation of the package, by links into the source tree."""
    prefix = tmp_path / 'prefix'
    index = prefix / 'share' / 'ament_index' / 'resource_index' / 'packages'
    index.mkdir(parents=True)
    (index / 'kp2d_ros').touch()
    share = prefix / 'share' / 'kp2d_ros'
    share.mkdir()
    for folder in ('launch', 'config'):
        (share / folder).symlink_to(ROOT / folder)
    libraries = prefix / 'lib' / 'kp2d_ros'
    libraries.mkdir(parents=True)
    for node in ('keypoint_node', 'camera_node'):
        script = libraries / node
        script.write_text(
            f'#!{sys.executable}\nimport sys\nfrom {NODES[node]} import main\nsys.exit(main())\n'
        )
        script.chmod(0o755)
    return prefix


LAUNCH = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
arguments = [argument.split(':=') for argument in sys.argv[2:]]
service = LaunchService()
service.include_launch_description(LaunchDescription([IncludeLaunchDescription(
    PythonLaunchDescriptionSource(sys.argv[1]), launch_arguments=arguments)]))
sys.exit(service.run())
"""


def test_it_starts_camera_and_node(prefix, tmp_path, photographs):
    pytest.importorskip('launch_ros', reason='launch and launch_ros are not installed')
    from robot import Process, Robot, new_domain
    from sensor_msgs.msg import PointCloud2

    model = write_responsive_model(tmp_path)
    domain = new_domain()
    robot = Robot(domain)
    script = tmp_path / 'run_launch.py'
    script.write_text(LAUNCH)
    given = {
        'model': model, 'runtime': 'torch', 'size': 160, 'max_keypoints': 77, 'camera': 'true',
        'namespace': '/front/kp2d', 'image': '/front/image_raw', 'local': 'true',
    }  # fmt: skip
    search = os.pathsep.join(
        part for part in (str(prefix), os.environ.get('AMENT_PREFIX_PATH', '')) if part
    )
    try:
        with Process(
            tmp_path / 'log', str(script), str(FILE),
            *(f'{name}:={value}' for name, value in given.items()),
            domain=domain, AMENT_PREFIX_PATH=search,
        ) as launch:  # fmt: skip
            launch.wait_for('waiting for images on /front/image_raw')
            heard = robot.listen(PointCloud2, '/front/kp2d/keypoints')
            robot.wait(lambda: len(heard) >= 3, 'keypoints')
            assert {cloud.width for cloud in heard} == {77}
            infos = robot.node.get_publishers_info_by_topic('/front/camera_info')
            assert [info.node_namespace for info in infos] == ['/front/kp2d']
            robot.wait(
                lambda: robot.node.count_subscribers('/front/camera_info') == 1, 'camera_info'
            )
            code, seconds = launch.stop()
            assert code == 0 and seconds < 8
            assert 'Traceback' not in launch.output
    finally:
        robot.close()


def test_it_refuses_what_is_neither_true_nor_false(prefix, tmp_path):
    pytest.importorskip('launch_ros', reason='launch and launch_ros are not installed')
    from robot import Process, new_domain

    script = tmp_path / 'run_launch.py'
    script.write_text(LAUNCH)
    with Process(
        tmp_path / 'log', str(script), str(FILE), 'managed:=perhaps',
        domain=new_domain(), AMENT_PREFIX_PATH=str(prefix),
    ) as launch:  # fmt: skip
        assert launch.process.wait(60) == 1
        assert "managed is 'true' or 'false', not 'perhaps'" in launch.output


def test_configurations_parse():
    """YAML with the node's defaults, JSON, XML, and RViz's YAML that names our topics."""
    import json
    import xml.etree.ElementTree as ElementTree

    import yaml

    pytest.importorskip('rclpy')
    from kp2d_ros.parameters import ros_value
    from kp2d_ros.settings import TABLE

    config = ROOT / 'config'
    values = yaml.safe_load((config / 'keypoints.yaml').read_text())['/**']['ros__parameters']
    expected = {name: ros_value(entry.default) for name, entry in TABLE.items()}
    assert values == expected
    assert all(type(values[name]) is type(value) for name, value in expected.items())
    names = '{http://www.eprosima.com/XMLSchemas/fastRTPS_Profiles}'
    profile = ElementTree.parse(config / 'fastdds.xml').getroot()
    sizes = [int(node.text) for node in profile.iter(f'{names}segment_size')]
    assert sizes == [64 * 2**20]
    rviz = yaml.safe_load((config / 'keypoints.rviz').read_text())
    displays = rviz['Visualization Manager']['Displays']
    topics = {d['Topic']['Value'] for d in displays if 'Topic' in d}
    assert '/kp2d/debug_image' in topics
    layout = json.loads((config / 'foxglove.json').read_text())
    assert '/kp2d/debug_image/compressed' in json.dumps(layout)
