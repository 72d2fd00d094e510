"""Shared code of the launch files: arguments, parameters and names. Imports only launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
from launch.actions import DeclareLaunchArgument, SetEnvironmentVariable
from launch_ros.actions import Node

SHARE = Path(get_package_share_directory('kp2d_ros'))

# Arguments that are parameters of the keypoint node; empty: keep the value of the parameter file.
PARAMETERS = {
    'image_transport': ('image_transport', str, 'raw, compressed, or the name of a plugin'),
    'model': ('model', str, 'auto, small, fast, half, a .safetensors or .onnx file'),
    'runtime': ('runtime', str, 'inference runtime: auto, openvino, onnxruntime, tensorrt, ...'),
    'precision': ('precision', ('auto', 'fp32', 'fp16', 'int8'), 'auto, fp32, fp16 or int8'),
    'threads': ('threads', int, 'CPU threads; 0: the runtime decides'),
    'size': ('working_size', int, 'longer side of resized images, in pixels; 0: do not resize'),
    'max_keypoints': ('max_keypoints', int, 'keep at most this many keypoints'),
    'managed': ('managed', bool, 'true: wait for lifecycle transitions'),
    'use_sim_time': ('use_sim_time', bool, 'true: take the time from /clock'),
}


def common_arguments() -> list[DeclareLaunchArgument]:
    return [
        DeclareLaunchArgument(
            'namespace', default_value='kp2d', description='namespace of the node and its topics'
        ),
        DeclareLaunchArgument(
            'params_file',
            default_value=str(SHARE / 'config' / 'keypoints.yaml'),
            description='parameters of the keypoint node',
        ),
        *(
            DeclareLaunchArgument(name, default_value='', description=description)
            for name, (_, _, description) in PARAMETERS.items()
        ),
        DeclareLaunchArgument(
            'respawn', default_value='true', description='false: do not restart a node that died'
        ),
        DeclareLaunchArgument(
            'debug', default_value='false', description='true: log debug messages'
        ),
    ]


def keypoint_node(
    text: Callable[[str], str], namespace: str, remappings: list[tuple[str, str]], **more: Any
) -> Node:
    """The node; `more` are parameters that the launch file itself sets."""
    return Node(
        package='kp2d_ros',
        executable='keypoint_node',
        name='keypoint_node',
        namespace=namespace,
        output='screen',
        parameters=[
            existing_file('params_file', text('params_file')), {**given_parameters(text), **more}
        ],
        remappings=remappings,
        ros_arguments=debug_arguments(text, namespace),
        **respawning(text),
    )  # fmt: skip


def respawning(text: Callable[[str], str]) -> dict[str, Any]:
    return {'respawn': checked('respawn', text('respawn'), bool), 'respawn_delay': 2.0}


def debug_arguments(text: Callable[[str], str], namespace: str) -> list[str]:
    if not checked('debug', text('debug'), bool):
        return []
    logger = f'{namespace.strip("/").replace("/", ".")}.keypoint_node'.lstrip('.')
    return ['--log-level', f'{logger}:=debug']


def fastdds_profile() -> list[SetEnvironmentVariable]:
    profile = str(SHARE / 'config' / 'fastdds.xml')
    return [
        SetEnvironmentVariable(f'{name}_DEFAULT_PROFILES_FILE', profile)
        for name in ('FASTRTPS', 'FASTDDS')  # until Jazzy, since Kilted
    ]


def given_parameters(
    text: Callable[[str], str], table: Mapping[str, Any] = PARAMETERS
) -> dict[str, bool | int | float | str]:
    """Return the parameters that the user gave; they override the parameter file."""
    return {
        parameter: checked(argument, text(argument), kind)
        for argument, (parameter, kind, _) in table.items()
        if text(argument)
    }


def checked(name: str, value: str, kind: Any) -> bool | int | float | str:
    """Convert the value of an argument; raise a ValueError with its name if that fails."""
    if kind is bool:
        if value.lower() not in ('true', 'false', '1', '0'):
            raise ValueError(f"{name} must be 'true' or 'false', not '{value}'")
        return value.lower() in ('true', '1')
    if kind is int:
        if not value.isdecimal():
            raise ValueError(f"{name} must be a whole number, not '{value}'")
        return int(value)
    if kind is float:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, not '{value}'") from None
    if kind is not str and value not in kind:
        raise ValueError(f"{name} must be one of {', '.join(kind)}, not '{value}'")
    return value


def existing_file(name: str, path: str) -> str:
    if not Path(path).expanduser().is_file():
        raise ValueError(f"{name}: there is no file '{path}'")
    return str(Path(path).expanduser())


def require_package(argument: str, package: str) -> None:
    try:
        get_package_share_directory(package)
    except PackageNotFoundError:
        problem = f'{argument}:=true needs the package {package}, which is not installed'
        raise ValueError(problem) from None


def absolute(name: str, namespace: str) -> str:
    """A name as seen from a namespace: '/robot', 'camera/image_raw' -> '/robot/camera/...'."""
    return name if name.startswith('/') else f'/{namespace}/{name}'.replace('//', '/').rstrip('/')


def parent(name: str) -> str:
    """'/robot/kp2d' -> '/robot'."""
    return name.rpartition('/')[0]


def camera_remappings(image: str, camera_info: str, prefix: str = '') -> list[tuple[str, str]]:
    return [
        (f'{prefix}image', image),
        (f'{prefix}image/compressed', f'{image}/compressed'),
        (f'{prefix}camera_info', camera_info),
    ]
