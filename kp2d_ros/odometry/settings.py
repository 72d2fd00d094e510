"""Settings of the odometry node: defaults, descriptions, allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kp2d_core.checks import shown
from kp2d_ros.settings import Entry, fixed, setting

TF = ('none', 'odom', 'all')


def check_pose(value: Any) -> None:
    if len(value) != 6:
        raise ValueError(
            f'camera_pose must be x, y, z, roll, pitch, yaw: 6 numbers, got {shown(list(value))}'
        )


@dataclass(frozen=True)
class OdometrySettings:
    """All settings."""

    # The input.
    stereo: bool = fixed(
        False, 'Also subscribe to right/keypoints and right/camera_info of a rectified stereo '
        'pair; its baseline sets the scale.',
    )  # fmt: skip
    stereo_baseline: float = fixed(
        0.0, 'Baseline of the stereo pair in metres; 0: take it from P of right/camera_info.',
        range=(0.0, 100.0),
    )  # fmt: skip
    sync_tolerance: float = fixed(
        0.005, 'Pair keypoints of the left and the right camera if their stamps differ by at most '
        'this many seconds.', range=(0.0, 1.0),
    )  # fmt: skip
    queue_size: int = fixed(
        5, 'Queue at most this many frames; a full queue drops its oldest frame.',
        range=(1, 1000),
    )  # fmt: skip
    # Scale.
    camera_height: float = fixed(
        0.0, 'Height of the camera in metres above a flat ground that it sees; sets the scale. '
        '0: unknown.', range=(0.0, 1000.0),
    )  # fmt: skip
    scale: float = fixed(
        0.0, 'Metres per unit of the map, if you know it; 0: unknown.',
        range=(0.0, 1e6),
    )  # fmt: skip
    # Frames.
    odom_frame: str = fixed('odom', 'Reference frame of the published poses.')
    base_frame: str = fixed('base_link', 'Frame whose poses are published; x forward, z up.')
    camera_pose: tuple[float, ...] = fixed(
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 'Pose of the camera in the base frame: x, y, z in metres, '
        'roll, pitch, yaw in radians. All zeros: the camera looks along x. Write numbers with '
        'decimal points.',
        values='6 numbers', verify=check_pose,
    )  # fmt: skip
    tf: str = fixed(
        'odom', 'Transforms to publish on /tf. none: nothing; odom: odom_frame to base_frame; '
        "all: also base_frame to the camera's optical frame, for a robot without a robot "
        'description.', choices=TF,
    )  # fmt: skip
    # Bounds.
    max_keyframes: int = fixed(
        500, 'Keep at most this many keyframes; drop redundant ones beyond that. A keyframe takes '
        'about 0.3 MB.',
        range=(20, 100_000),
    )  # fmt: skip
    path_length: int = fixed(
        2000, 'Publish at most this many poses in path; a longer path is thinned out.',
        range=(10, 100_000),
    )  # fmt: skip
    map_period: float = fixed(
        0.5, 'Seconds between two messages on path and on map_points.', range=(0.05, 60.0)
    )
    map_radius: float = setting(
        0.0, 'Publish map points within this many metres of the camera; 0: all.',
        range=(0.0, 1e6),
    )  # fmt: skip
    save_folder: str = setting(
        '~/.ros/kp2d', 'Folder where save_map writes the map (PLY) and the trajectory (TUM).'
    )
    # The node.
    managed: bool = fixed(
        False, 'Wait for lifecycle transitions instead of starting automatically.'
    )
    diagnostics_period: float = fixed(
        1.0, 'Seconds between two messages on /diagnostics.', range=(0.1, 60.0)
    )


ODOMETRY_TABLE = {
    each.name: Entry(each.name, each.default, each.metadata['limits'])
    for each in fields(OdometrySettings)
}


def changed(settings: OdometrySettings, values: Mapping[str, Any]) -> OdometrySettings:
    """Return the settings with these values; ignore names that are not settings."""
    known = {name: value for name, value in values.items() if name in ODOMETRY_TABLE}
    if 'camera_pose' in known:
        known['camera_pose'] = tuple(known['camera_pose'])
    return replace(settings, **known)


if __name__ == '__main__':  # the table of docs/odometry_node.md
    from kp2d_ros.parameters import table

    print(table(ODOMETRY_TABLE), end='')
