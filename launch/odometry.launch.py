"""The way of one camera: ros2 launch kp2d_ros odometry.launch.py image:=/camera/image_raw

Starts the keypoint node and the odometry node. Of one camera the scale is arbitrary: give
camera_height:=1.2, the metres of the camera above a flat ground.
"""

from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

SHARE = Path(get_package_share_directory('kp2d_ros'))

# Arguments that are parameters of the keypoint node; empty: as the parameter file has it.
PARAMETERS = {
    'image_transport': ('image_transport', str, 'raw, compressed, or the name of a plugin'),
    'model': ('model', str, 'auto, small, v4, a .safetensors file or an exported model'),
    'runtime': ('runtime', str, 'what runs the model: auto, openvino, onnxruntime, tensorrt, ...'),
    'threads': ('threads', int, 'CPU threads of the runtime; 0: it decides'),
    'size': ('working_size', int, 'resize images to this longer side, in pixels; 0: do not'),
    'max_keypoints': ('max_keypoints', int, 'keep at most this many keypoints'),
}
# Arguments that are parameters of the odometry node; empty: its defaults.
ODOMETRY_PARAMETERS = {
    'camera_height': ('camera_height', float, 'metres above a flat ground: gives the scale'),
    'odom_frame': ('odom_frame', str, 'frame in which the poses are given'),
    'base_frame': ('base_frame', str, 'frame whose poses are given'),
    'tf': ('tf', ('none', 'odom', 'all'), 'what goes to /tf: none, odom or all'),
    'save_folder': ('save_folder', str, 'where save_map writes'),
}
# Of both nodes.
BOTH = {
    'managed': ('managed', bool, 'true: wait for lifecycle transitions'),
    'use_sim_time': ('use_sim_time', bool, 'true: time is on /clock'),
}

ARGUMENTS = [
    DeclareLaunchArgument(
        'image',
        default_value='camera/image_raw',
        description='image topic; a relative name is looked for beside the namespace of the nodes',
    ),
    DeclareLaunchArgument(
        'camera_info', default_value='', description='its camera_info; empty: beside the image'
    ),
    DeclareLaunchArgument(
        'namespace', default_value='kp2d', description='of the nodes and of what they publish'
    ),
    DeclareLaunchArgument(
        'params_file',
        default_value=str(SHARE / 'config' / 'keypoints.yaml'),
        description='parameters of the keypoint node',
    ),
    DeclareLaunchArgument(
        'odometry_params_file',
        default_value=str(SHARE / 'config' / 'odometry.yaml'),
        description='parameters of the odometry node',
    ),
    *(
        DeclareLaunchArgument(name, default_value='', description=description)
        for name, (_, _, description) in {**PARAMETERS, **ODOMETRY_PARAMETERS, **BOTH}.items()
    ),
    DeclareLaunchArgument(
        'vins_features', default_value='false',
        description='true: publish feature_tracker/feature for VINS-Fusion, too',
    ),
    DeclareLaunchArgument(
        'local',
        default_value='false',
        description='true: all is on this machine, use the Fast DDS profile for large messages',
    ),
    DeclareLaunchArgument(
        'respawn', default_value='true', description='false: do not restart a node that died'
    ),
    DeclareLaunchArgument(
        'rviz', default_value='false', description='true: show path and map in RViz'
    ),
]  # fmt: skip


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """Everything is checked before anything is started."""

    def text(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    def flag(name: str) -> bool:
        return checked(name, text(name), bool)

    pushed = context.launch_configurations.get('ros_namespace', '')
    namespace = absolute(text('namespace'), pushed)
    image = absolute(text('image'), parent(namespace))
    camera_info = absolute(
        text('camera_info') or f'{parent(image)}/camera_info', parent(namespace)
    )
    both = given_parameters(text, BOTH)
    keypoints = {**given_parameters(text, PARAMETERS), **both}
    odometry = {**given_parameters(text, ODOMETRY_PARAMETERS), **both}
    params_file = existing_file('params_file', text('params_file'))
    odometry_file = existing_file('odometry_params_file', text('odometry_params_file'))
    respawn = {'respawn': flag('respawn'), 'respawn_delay': 2.0}
    local, rviz, vins = flag('local'), flag('rviz'), flag('vins_features')
    if rviz:
        require_package('rviz', 'rviz2')

    def node(name: str, parameters: list, remappings: list) -> Node:
        return Node(
            package='kp2d_ros', executable=name, name=name, namespace=namespace, output='screen',
            parameters=parameters, remappings=remappings, **respawn,
        )  # fmt: skip

    actions: list[LaunchDescriptionEntity] = []
    if local:
        profile = str(SHARE / 'config' / 'fastdds.xml')
        for name in ('FASTRTPS', 'FASTDDS'):  # until Jazzy, since Kilted
            actions.append(SetEnvironmentVariable(f'{name}_DEFAULT_PROFILES_FILE', profile))
    images = [('image', image), ('image/compressed', f'{image}/compressed')]
    infos = [('camera_info', camera_info)]
    actions.append(node('keypoint_node', [params_file, keypoints], [*images, *infos]))
    actions.append(node('odometry_node', [odometry_file, odometry], infos))
    if vins:
        sim_time = {k: v for k, v in both.items() if k == 'use_sim_time'}
        actions.append(node('vins_node', [sim_time], []))
    if rviz:
        actions.append(
            Node(
                package='rviz2', executable='rviz2', namespace=namespace,
                arguments=['-d', str(SHARE / 'config' / 'odometry.rviz')],
                remappings=[
                    (f'/kp2d/{topic}', topic)
                    for topic in ('debug_image', 'odometry', 'path', 'map_points')
                ],
            )
        )  # fmt: skip
    return actions


def given_parameters(text, table) -> dict[str, bool | int | float | str]:
    """Those that the user gave: they go before the parameter file's."""
    return {
        parameter: checked(argument, text(argument), kind)
        for argument, (parameter, kind, _) in table.items()
        if text(argument)
    }


def checked(name: str, value: str, kind) -> bool | int | float | str:
    """The value of an argument; ValueError with its name if it is no such thing."""
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
