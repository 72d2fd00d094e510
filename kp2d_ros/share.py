"""Where the files of launch/ and config/ are: in the source tree, or where it was installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kp2d_core.errors import FileError


def shared_file(name: str) -> Path:
    """'config/fastdds.xml' -> its path."""
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


def use_fastdds_profile() -> None:
    """In this process and its children, unless the environment names another."""
    profile = str(shared_file('config/fastdds.xml'))
    for name in ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE'):
        os.environ.setdefault(name, profile)  # until Jazzy, since Kilted
