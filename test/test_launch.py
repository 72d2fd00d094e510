"""The launch file: what it declares, and what it starts where launch is installed."""

import ast
import os
import re
import sys
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from kp2d_ros.startup import NODES

FILE = ROOT / 'launch' / 'keypoints.launch.py'
ODOMETRY = ROOT / 'launch' / 'odometry.launch.py'
STEREO = ROOT / 'launch' / 'stereo.launch.py'
SHARED = ROOT / 'kp2d_ros' / 'launching.py'


def declared_in(path: Path) -> list[str]:
    """Without launch: from its syntax tree."""
    return [
        call.args[0].value
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and getattr(call.func, 'id', '') == 'DeclareLaunchArgument'
        and isinstance(call.args[0], ast.Constant)
    ]


def shared_parameters() -> ast.Dict:
    return next(
        node.value for node in ast.parse(SHARED.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == 'PARAMETERS'
    )  # fmt: skip


@pytest.mark.parametrize('name', ['keypoints', 'stereo'])
def test_it_declares_what_is_documented(name):
    declared = declared_in(ROOT / 'launch' / f'{name}.launch.py') + declared_in(SHARED)
    declared += [key.value for key in shared_parameters().keys]
    documentation = (ROOT / 'docs' / 'node.md').read_text()
    section = documentation.split('## Launch')[1].split('\n## ')[0]
    table = section.split(f'{name}.launch.py')[1].split('\n\n')
    rows = next(part for part in table if part.startswith('| argument'))
    documented = re.findall(r'^\| `(\w+)` ', rows, re.MULTILINE)
    if name == 'stereo':  # the table names only what keypoints.launch.py has not
        documented += ['respawn', 'debug', 'namespace', 'params_file']
        documented += [key.value for key in shared_parameters().keys]
    assert sorted(declared) == sorted(documented)


def test_its_arguments_are_parameters_of_the_node():
    pytest.importorskip('rclpy')
    from kp2d_ros.settings import TABLE

    for row in shared_parameters().values:
        name, kind, _ = row.elts
        if name.value == 'use_sim_time':  # every node has it
            continue
        entry = TABLE[name.value]
        if isinstance(kind, ast.Tuple):
            assert tuple(choice.value for choice in kind.elts) == entry.limits.choices
        else:
            assert type(entry.default).__name__ == kind.id


def tables(file: Path) -> dict[str, ast.Dict]:
    """The tables of arguments in a launch file, by name."""
    return {
        node.targets[0].id: node.value
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }


def test_odometry_launch_declares_what_is_documented_and_what_the_nodes_have():
    pytest.importorskip('nav_msgs')
    from kp2d_ros.odometry.settings import ODOMETRY_TABLE
    from kp2d_ros.settings import TABLE

    found = tables(ODOMETRY)
    owners = {
        'PARAMETERS': [TABLE], 'ODOMETRY_PARAMETERS': [ODOMETRY_TABLE],
        'BOTH': [TABLE, ODOMETRY_TABLE],
    }  # fmt: skip
    assert set(found) == set(owners)
    declared = re.findall(r"DeclareLaunchArgument\(\s*'(\w+)'", ODOMETRY.read_text())
    for name, table in found.items():
        declared += [key.value for key in table.keys]
        for row in table.values:
            parameter, kind, _ = row.elts
            for owner in owners[name] if parameter.value != 'use_sim_time' else []:
                entry = owner[parameter.value]
                if isinstance(kind, ast.Tuple):
                    assert tuple(choice.value for choice in kind.elts) == entry.limits.choices
                else:
                    assert type(entry.default).__name__ == kind.id
    section = (ROOT / 'docs' / 'odometry_node.md').read_text().split('## Launch arguments')[1]
    rows = [line.split('|')[1] for line in section.splitlines() if line.startswith('| `')]
    assert sorted(declared) == sorted(re.findall(r'`(\w+)`', ' '.join(rows)))


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
    for node in NODES:
        script = libraries / node
        script.write_text(
            f'#!{sys.executable}\nimport sys\nfrom {NODES[node]} import main\nsys.exit(main())\n'
        )
        script.chmod(0o755)
    return prefix


LAUNCH = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import GroupAction, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch_ros.actions import PushRosNamespace
arguments = [argument.split(':=') for argument in sys.argv[3:]]
included = IncludeLaunchDescription(
    PythonLaunchDescriptionSource(sys.argv[1]), launch_arguments=arguments)
pushed = [PushRosNamespace(sys.argv[2])] if sys.argv[2] else []
service = LaunchService()
service.include_launch_description(LaunchDescription([GroupAction([*pushed, included])]))
sys.exit(service.run())
"""


@pytest.fixture
def launch(prefix, tmp_path):
    """Starts the launch file with arguments, in a domain and under a namespace."""
    pytest.importorskip('launch_ros', reason='launch and launch_ros are not installed')
    from robot import Process

    script = tmp_path / 'run_launch.py'
    script.write_text(LAUNCH)
    search = os.pathsep.join(
        part for part in (str(prefix), os.environ.get('AMENT_PREFIX_PATH', '')) if part
    )

    def run(domain: int, pushed: str = '', file: Path = FILE, **given) -> Process:
        arguments = [f'{name}:={value}' for name, value in given.items()]
        return Process(
            tmp_path / 'log', str(script), str(file), pushed, *arguments,
            domain=domain, AMENT_PREFIX_PATH=search,
        )  # fmt: skip

    return run


def test_it_starts_camera_and_node(launch, robot, domain, model):
    from sensor_msgs.msg import PointCloud2

    with launch(
        domain, model=model, runtime='torch', size=160, max_keypoints=77, camera='true',
        namespace='/front/kp2d', image='image_raw', respawn='false',
    ) as running:  # fmt: skip
        running.wait_for('waiting for images on /front/image_raw')
        heard = robot.listen(PointCloud2, '/front/kp2d/keypoints')
        robot.wait(lambda: len(heard) >= 3, 'keypoints')
        assert {cloud.width for cloud in heard} == {77}
        assert {cloud.header.frame_id for cloud in heard} == {'camera_optical_frame'}
        infos = robot.node.get_publishers_info_by_topic('/front/camera_info')
        assert [info.node_namespace for info in infos] == ['/front/kp2d']
        robot.wait(lambda: robot.node.count_subscribers('/front/camera_info') == 1, 'camera_info')
        assert running.stop()[0] == 0
        assert 'Traceback' not in running.output


def test_alone_it_finds_the_camera_node_alone_in_a_namespaced_bring_up(
    launch, robot, domain, model, tmp_path
):
    """Both with their default names: the camera under /robot, the launch file pushed there."""
    from robot import Process
    from sensor_msgs.msg import PointCloud2

    with (
        Process(
            tmp_path / 'camera', '-m', NODES['camera_node'], '--ros-args',
            '-r', '__ns:=/robot/camera', '-p', 'width:=160', '-p', 'height:=120', domain=domain,
        ),
        launch(domain, '/robot', model=model, runtime='torch', threads=1) as running,
    ):  # fmt: skip
        running.wait_for('waiting for images on /robot/camera/image_raw')
        heard = robot.listen(PointCloud2, '/robot/kp2d/keypoints')
        robot.wait(lambda: heard, 'keypoints')


def test_a_stereo_pair_in_a_namespace(launch, robot, domain, model, picture):
    from robot import image_message
    from sensor_msgs.msg import Image, PointCloud2

    with launch(
        domain, '/robot', STEREO, model=model, runtime='torch', threads=1, left='front/left/image'
    ) as running:
        running.wait_for('waiting for images on /robot/front/left/image')
        images = [
            robot.publisher(Image, topic)
            for topic in ('/robot/front/left/image', '/robot/right/image_raw')
        ]
        pairs = robot.listen(PointCloud2, '/robot/kp2d/right/stereo_matches')
        stamps = iter(range(1, 1000))

        def matched() -> bool:
            stamp = next(stamps)
            for each in images:
                each.publish(image_message(picture, stamp))
            robot.spin(0.3)
            return bool(pairs)

        robot.wait(matched, 'matches between the cameras')


def test_a_node_that_died_is_restarted(launch, robot, domain, model):
    with launch(domain, model=model, runtime='torch', threads=1) as running:
        running.wait_for('waiting for images on /camera/image_raw')
        (child,) = psutil.Process(running.process.pid).children()
        child.kill()
        robot.wait(lambda: running.output.count('waiting for images') == 2, 'its successor')


def test_odometry_launch_starts_both_nodes_and_restarts_them(launch, robot, domain, model):
    pytest.importorskip('nav_msgs')
    with launch(
        domain, '/robot', ODOMETRY, model=model, runtime='torch', threads=1, camera_height=1.2,
        tf='none', vins_features='true',
    ) as running:  # fmt: skip
        running.wait_for('waiting for keypoints on /robot/kp2d/keypoints')
        running.wait_for('waiting for images on /robot/camera/image_raw')
        running.wait_for('to /feature_tracker/feature')
        infos = '/robot/camera/camera_info'
        robot.wait(lambda: robot.node.count_subscribers(infos) >= 2, 'both to hear camera_info')
        status = robot.status('robot/kp2d/odometry_node: odometry')
        values = {value.key: value.value for value in status.values}
        assert values['scale'] == 'not known yet: 0 views of the ground'
        assert values['tf'] == 'switched off'
        for child in psutil.Process(running.process.pid).children():
            if 'odometry_node' in ' '.join(child.cmdline()):
                child.kill()
        said = 'waiting for keypoints'
        robot.wait(lambda: running.output.count(said) == 2, 'its successor')


def test_odometry_launch_of_a_stereo_pair(launch, robot, domain, model):
    pytest.importorskip('nav_msgs')
    with launch(
        domain, '/robot', ODOMETRY, model=model, runtime='torch', threads=1, stereo='true',
        left='front/left/image_rect', right='front/right/image_rect',
    ) as running:  # fmt: skip
        running.wait_for('waiting for keypoints on /robot/kp2d/left/keypoints')
        running.wait_for('waiting for images on /robot/front/left/image_rect')
        for side in ('left', 'right'):
            for topic in (f'/robot/front/{side}/camera_info', f'/robot/kp2d/{side}/keypoints'):
                robot.wait(lambda topic=topic: robot.node.count_subscribers(topic), topic)
        status = robot.status('robot/kp2d/odometry_node: odometry')
        values = {value.key: value.value for value in status.values}
        assert values['scale'] == 'metres, by the stereo baseline'


def test_odometry_launch_refuses_bad_arguments(launch, domain):
    with launch(domain, file=ODOMETRY, camera_height='high') as running:
        assert running.process.wait(60) == 1
        assert "camera_height must be a number, not 'high'" in running.output
        assert 'process started' not in running.output


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        ({'managed': 'perhaps'}, "managed must be 'true' or 'false', not 'perhaps'"),
        ({'params_file': '/nowhere.yaml'}, "params_file: there is no file '/nowhere.yaml'"),
        ({'threads': 'two'}, "threads must be a whole number, not 'two'"),
        ({'precision': 'int4'}, 'precision must be one of auto, fp32, fp16, int8'),
        ({'rviz': 'true'}, 'rviz:=true needs the package rviz2, which is not installed'),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(launch, domain, given, sentence):
    with launch(domain, camera='true', **given) as running:
        assert running.process.wait(60) == 1
        assert sentence in running.output
        assert 'process started' not in running.output


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
    odometry = yaml.safe_load((config / 'odometry.rviz').read_text())
    displays = odometry['Visualization Manager']['Displays']
    topics = {d['Topic']['Value'] for d in displays if 'Topic' in d}
    ours = {'/kp2d/path', '/kp2d/map_points', '/kp2d/odometry'}
    assert ours < topics
    assert set(layout['configById']['3D!way']['topics']) == ours


def test_odometry_parameters_file_and_documentation():
    import yaml

    pytest.importorskip('nav_msgs')
    from kp2d_ros.odometry.settings import ODOMETRY_TABLE
    from kp2d_ros.parameters import ros_value, table

    text = (ROOT / 'config' / 'odometry.yaml').read_text()
    values = yaml.safe_load(text)['/**']['ros__parameters']
    expected = {name: ros_value(entry.default) for name, entry in ODOMETRY_TABLE.items()}
    assert values == expected
    assert all(type(values[name]) is type(value) for name, value in expected.items())
    assert table(ODOMETRY_TABLE) in (ROOT / 'docs' / 'odometry_node.md').read_text()
