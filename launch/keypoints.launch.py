"""Keypoints of one camera: ros2 launch kp2d_ros keypoints.launch.py image:=/camera/image_raw

Several cameras: launch it once for each, with another namespace:=/front/kp2d.
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
    'image_transport': ('image_transport', ('raw', 'compressed'), 'raw or compressed'),
    'model': ('model', str, 'auto, small, v4, a .safetensors file or an exported model'),
    'runtime': ('runtime', str, 'inference runtime: auto, openvino, onnxruntime, tensorrt, torch'),
    'precision': ('precision', ('auto', 'fp32', 'fp16', 'int8'), 'auto, fp32, fp16 or int8'),
    'threads': ('threads', int, 'CPU threads; 0: the runtime decides'),
    'size': ('working_size', int, 'resize the longer side of images to this; 0: do not resize'),
    'max_keypoints': ('max_keypoints', int, 'keep at most this many keypoints'),
    'managed': ('managed', bool, 'true: wait for lifecycle transitions'),
    'use_sim_time': ('use_sim_time', bool, 'true: take the time from /clock'),
}

ARGUMENTS = [
    DeclareLaunchArgument(
        'image',
        default_value='camera/image_raw',
        description='image topic; a relative name starts at the parent of the namespace',
    ),
    DeclareLaunchArgument(
        'camera_info', default_value='', description='camera_info topic; empty: next to image'
    ),
    DeclareLaunchArgument(
        'namespace', default_value='kp2d', description='namespace of the node and its topics'
    ),
    DeclareLaunchArgument(
        'params_file',
        default_value=str(SHARE / 'config' / 'keypoints.yaml'),
        description='parameter file of the keypoint node',
    ),
    *(
        DeclareLaunchArgument(name, default_value='', description=description)
        for name, (_, _, description) in PARAMETERS.items()
    ),
    DeclareLaunchArgument(
        'camera', default_value='false', description='true: also start the camera node'
    ),
    DeclareLaunchArgument(
        'source',
        default_value='',
        description='source of the camera node: a folder, video, bag or webcam; empty: a camera '
        'moves through a room',
    ),
    DeclareLaunchArgument(
        'local',
        default_value='auto',
        description='true: all nodes run on this machine, use the Fast DDS profile for large '
        'images; auto: true if the camera node is started too',
    ),
    DeclareLaunchArgument(
        'respawn', default_value='true', description='false: do not restart a node that died'
    ),
    DeclareLaunchArgument('debug', default_value='false', description='true: log debug messages'),
    DeclareLaunchArgument(
        'rviz',
        default_value='false',
        description='true: show the overlay and the keypoints in RViz',
    ),
]


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
    given = given_parameters(text)
    params_file = existing_file('params_file', text('params_file'))
    local = flag('camera') if text('local') == 'auto' else flag('local')
    respawn = {'respawn': flag('respawn'), 'respawn_delay': 2.0}
    debug, rviz, camera = flag('debug'), flag('rviz'), flag('camera')
    if rviz:
        require_package('rviz', 'rviz2')

    actions: list[LaunchDescriptionEntity] = []
    if local:
        profile = str(SHARE / 'config' / 'fastdds.xml')
        for name in ('FASTRTPS', 'FASTDDS'):  # until Jazzy, since Kilted
            actions.append(SetEnvironmentVariable(f'{name}_DEFAULT_PROFILES_FILE', profile))
    actions.append(
        Node(
            package='kp2d_ros',
            executable='keypoint_node',
            name='keypoint_node',
            namespace=namespace,
            output='screen',
            parameters=[params_file, given],
            remappings=[
                ('image', image),
                ('image/compressed', f'{image}/compressed'),
                ('camera_info', camera_info),
            ],
            ros_arguments=['--log-level', f'{logger(namespace)}:=debug'] if debug else [],
            **respawn,
        )
    )
    if camera:
        sim_time = {k: v for k, v in given.items() if k == 'use_sim_time'}
        actions.append(
            Node(
                package='kp2d_ros',
                executable='camera_node',
                name='camera_node',
                namespace=namespace,
                output='screen',
                parameters=[{'source': text('source')}, sim_time],
                remappings=[
                    ('image_raw', image),
                    ('image_raw/compressed', f'{image}/compressed'),
                    ('camera_info', camera_info),
                ],
                **respawn,
            )
        )
    if rviz:
        actions.append(
            Node(
                package='rviz2',
                executable='rviz2',
                namespace=namespace,
                arguments=['-d', str(SHARE / 'config' / 'keypoints.rviz')],
                remappings=[
                    ('/kp2d/debug_image', 'debug_image'),
                    ('/kp2d/keypoints', 'keypoints'),
                ],
            )
        )
    return actions


def given_parameters(text) -> dict[str, bool | int | str]:
    """Those that the user gave: they go before the parameter file's."""
    return {
        parameter: checked(argument, text(argument), kind)
        for argument, (parameter, kind, _) in PARAMETERS.items()
        if text(argument)
    }


def checked(name: str, value: str, kind) -> bool | int | str:
    """The value of an argument; ValueError with its name if it is no such thing."""
    if kind is bool:
        if value.lower() not in ('true', 'false', '1', '0'):
            raise ValueError(f"{name} must be 'true' or 'false', not '{value}'")
        return value.lower() in ('true', '1')
    if kind is int:
        if not value.isdecimal():
            raise ValueError(f"{name} must be a whole number, not '{value}'")
        return int(value)
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


def logger(namespace: str) -> str:
    return f'{namespace.strip("/").replace("/", ".")}.keypoint_node'.lstrip('.')
