"""The README's lines for robots, with the versions of Ubuntu 24.04: `make test-robot`.

Wheels replace the packages of apt, in the same versions. They are in a separate venv, which the
robot's venv sees as its system. This is not part of `make test` because it installs half a
gigabyte.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NUMPY, OPENCV = '1.26.4', '4.6.0'  # of Ubuntu 24.04
SYSTEM = [
    f'numpy=={NUMPY}', f'opencv-python-headless=={OPENCV}.66', 'PyYAML==6.0.1', 'tqdm==4.66.2',
    'colcon-common-extensions', 'catkin-pkg', 'setuptools<80', 'pytest-timeout==2.2.0',
]  # fmt: skip
PYTHON = '3.12'


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, f'{command}\n{done.stdout}\n{done.stderr}'
    return done.stdout


def python() -> str:
    """Ubuntu's, where this machine has it; else the one that runs the tests."""
    homes = [
        shutil.which(f'python{PYTHON}'),
        *Path.home().glob(f'.pyenv/versions/{PYTHON}.*/bin/python3'),
    ]
    for path in filter(None, homes):
        if subprocess.run([path, '--version'], capture_output=True).returncode == 0:
            return str(path)
    return sys.executable


def site_packages(prefix: Path) -> Path:
    return next(prefix.glob('lib/python*/site-packages'))


def readme_line(beginning: str) -> list[str]:
    """Find the command for Jazzy in the README with this beginning; return its words."""
    section = (ROOT / 'README.md').read_text().split('**ROS 2 Jazzy')[1].split('```')[1]
    lines = (line.partition('#')[0] for line in section.splitlines())
    commands = (command.strip() for line in lines for command in line.split('&&'))
    found = next(command for command in commands if command.startswith(beginning))
    return [word.strip("'") for word in found.split()]


@pytest.fixture(scope='session')
def system(tmp_path_factory) -> Path:
    """What apt would have installed, ROS among it."""
    prefix = tmp_path_factory.mktemp('system') / 'usr'
    run(python(), '-m', 'venv', prefix)
    pip = [prefix / 'bin' / 'pip', 'install', '--quiet', '--disable-pip-version-check']
    constraints = tmp_path_factory.mktemp('constraints') / 'ros.txt'
    pinned = (ROOT / 'requirements' / 'constraints.txt').read_text().splitlines()
    constraints.write_text('\n'.join(line for line in pinned if line.startswith('ros-')))
    for packages in (SYSTEM, ['-r', ROOT / 'requirements' / 'ros.txt', '-c', constraints]):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=900)
        if done.returncode:
            pytest.skip(f'the registry does not have them: {done.stderr.strip().splitlines()[-1]}')
    return prefix


@pytest.fixture(scope='session')
def robot(system, tmp_path_factory) -> dict[str, str]:
    """The environment after the README's lines: a venv that sees the system, pip, colcon."""
    home = tmp_path_factory.mktemp('home')
    venv = home / 'kp2d'
    run(python(), '-m', 'venv', venv)
    (site_packages(venv) / 'system.pth').write_text(
        f'import site; site.addsitedir({str(site_packages(system))!r})\n'
    )
    run(venv / 'bin' / 'pip', *readme_line('pip install')[1:])
    workspace = home / 'workspace'
    shutil.copytree(ROOT, workspace / 'src', symlinks=True, ignore=shutil.ignore_patterns(
        '.venv', '.git', 'build', 'install', 'log', 'out', 'runs', '*.egg-info', '__pycache__',
    ))  # fmt: skip
    path = os.pathsep.join([str(venv / 'bin'), str(system / 'bin'), os.environ['PATH']])
    base = {
        k: v for k, v in os.environ.items() if not k.startswith(('PYTHON', 'AMENT', 'VIRTUAL'))
    }
    environment = {**base, 'PATH': path, 'AMENT_PREFIX_PATH': str(system)}
    run(*readme_line('colcon build'), cwd=workspace, env=environment)
    sourced = run('sh', '-c', '. install/setup.sh && env -0', cwd=workspace, env=environment)
    return dict(line.split('=', 1) for line in sourced.split('\0') if line)


def test_numpy_and_opencv_are_still_the_systems(robot):
    code = 'import cv2, numpy; print(numpy.__version__, cv2.__version__, cv2.ORB_create())'
    assert run('python3', '-c', code, env=robot).startswith(f'{NUMPY} {OPENCV}')
    assert 'torch' not in run('python3', '-m', 'pip', 'list', env=robot)


def test_the_core_works(robot, tmp_path):
    run('kp2d', 'info', env=robot, cwd=tmp_path)
    code = """
import numpy as np
from kp2d_core import KeypointDetector, match
from kp2d_ros.camera.moving_view import MovingView, drawn_photograph
views = MovingView(drawn_photograph(), (320, 240)).pictures()
detector = KeypointDetector.load(threads=2)
first, second = (detector.detect(next(views).image, max_keypoints=300) for _ in range(2))
found = match(first, second, verification='fundamental')
print(int(found.inliers.sum()), detector.runtime.description)
"""
    inliers, description = run('python3', '-c', code, env=robot).split(maxsplit=1)
    assert int(inliers) > 100 and description.startswith('OpenVINO')


@pytest.mark.parametrize(
    ('colcon', 'passes'), [(['colcon'], False), (['python3', '-m', 'colcon'], True)]
)
def test_colcon_test_runs_the_tests(robot, colcon, passes):
    """With the system's Python, which lacks safetensors, and with that of the venv."""
    workspace = Path(robot['AMENT_PREFIX_PATH'].split(os.pathsep)[0]).parents[1]
    chosen = ['-k', 'test_matching or test_tracking or test_messages'] if passes else []
    run(*colcon, 'test', '--pytest-args', '-q', *chosen, cwd=workspace, env=robot)
    said = run(*colcon, 'test-result', '--all', cwd=workspace, env=robot)
    numbers = re.search(r'Summary: (\d+) tests, 0 errors, 0 failures, (\d+) skipped', said)
    assert numbers is not None, said
    tests, skipped = map(int, numbers.groups())
    assert tests - skipped > 50 if passes else tests > 50 and skipped, said


def test_camera_and_node_run(robot, tmp_path):
    """As `ros2 launch` starts them: the executables of the installation."""
    listen = """
import sys, time, rclpy
from rclpy.node import Node
from sensor_msgs.msg import PointCloud2
from kp2d_ros.messages import keypoints_from_cloud
rclpy.init()
node, ages = Node('listener'), []
node.create_subscription(PointCloud2, '/kp2d/keypoints',
    lambda cloud: ages.append(keypoints_from_cloud(cloud).track_ages.max(initial=0)), 5)
end = time.monotonic() + 90
while time.monotonic() < end and max(ages, default=0) < 5:
    rclpy.spin_once(node, timeout_sec=0.1)
print(len(ages), max(ages, default=0))
"""
    environment = {
        **robot,
        'ROS_DOMAIN_ID': str(1 + os.getpid() % 100),
        'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
        'FASTRTPS_DEFAULT_PROFILES_FILE': str(ROOT / 'config' / 'fastdds.xml'),
    }
    prefix = Path(robot['AMENT_PREFIX_PATH'].split(os.pathsep)[0]) / 'lib' / 'kp2d_ros'
    commands = {
        'camera_node': ['-p', 'width:=320', '-p', 'height:=240', '-p', 'rate:=10.0'],
        'keypoint_node': [
            '-r',
            'image:=/camera/image_raw',
            '-r',
            'camera_info:=/camera/camera_info',
        ],
    }
    running = []
    try:
        for name, arguments in commands.items():
            with (tmp_path / name).open('wb') as log:
                running.append(subprocess.Popen(
                    [prefix / name, '--ros-args', *arguments], stdout=log,
                    stderr=subprocess.STDOUT, env=environment,
                ))  # fmt: skip
        heard = run('python3', '-c', listen, env=environment)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)
    said = (tmp_path / 'keypoint_node').read_text()
    assert int(heard.split()[1]) >= 5, said
    assert 'Traceback' not in said and re.search('loaded .*: OpenVINO', said)
