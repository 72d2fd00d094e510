"""The list of nodes, and the environment that their processes need.

This imports neither ROS nor NumPy, which read the environment when they are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from kp2d_core.errors import FileError

# `ros2 run kp2d_ros NAME` -> its module
NODES = {
    'camera_node': 'kp2d_ros.camera.camera_node',
    'keypoint_node': 'kp2d_ros.keypoint_node',
    'odometry_node': 'kp2d_ros.odometry.odometry_node',
    'rtabmap_node': 'kp2d_ros.integrations.rtabmap_node',
    'vins_node': 'kp2d_ros.integrations.vins_node',
}


def use_fastdds_profile() -> None:
    """Use our Fast DDS profile in this process and its children, unless another is set."""
    profile = str(shared_file('config/fastdds.xml'))
    for name in ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE'):
        os.environ.setdefault(name, profile)  # until Jazzy, since Kilted


def shared_file(name: str) -> Path:
    """'config/fastdds.xml' -> its path, in the source tree or where it was installed."""
    places = [Path(__file__).parents[1], Path(sys.prefix) / 'share' / 'kp2d_ros']
    try:
        from ament_index_python.packages import get_package_share_directory

        places.insert(1, Path(get_package_share_directory('kp2d_ros')))
    except (ImportError, LookupError, OSError):  # no ROS, not installed, no AMENT_PREFIX_PATH
        pass
    for place in places:
        if (place / name).is_file():
            return place / name
    raise FileError(f'{name} is not installed in any of {", ".join(map(str, places))}')


def start_node(
    name: str, log: IO[bytes], parameters: dict[str, Any], *arguments: str, **environment: str
) -> subprocess.Popen[bytes]:
    """Start a node in a process that Ctrl-C does not reach; the parent ends it."""
    # JSON is YAML, and keeps the string '0' a string.
    given = [f'{key}:={json.dumps(value)}' for key, value in parameters.items()]
    options = [part for value in given for part in ('-p', value)]
    return subprocess.Popen(
        [sys.executable, '-m', NODES[name], '--ros-args', *options, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, **environment},
    )
