"""Keypoints of one camera: ros2 launch kp2d_ros keypoints.launch.py image:=/camera/image_raw

Several cameras: launch it once for each, with another namespace:=/front/kp2d.
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

SHARE = Path(get_package_share_directory('kp2d_ros'))

# Arguments that are parameters of the keypoint node; empty: as the parameter file has it.
PARAMETERS = {
    'image_transport': ('image_transport', str, 'raw or compressed'),
    'model': ('model', str, 'auto, small, v4, a .safetensors file or an exported model'),
    'runtime': ('runtime', str, 'what runs the model: auto, openvino, onnxruntime, tensorrt, ...'),
    'precision': ('precision', str, 'auto, fp32, fp16 or int8'),
    'threads': ('threads', int, 'CPU threads of the runtime; 0: it decides'),
    'size': ('working_size', int, 'longer side that the network runs at, in pixels; 0: as it is'),
    'max_keypoints': ('max_keypoints', int, 'keep the best so many'),
    'managed': ('managed', bool, 'true: wait for lifecycle transitions'),
    'use_sim_time': ('use_sim_time', bool, 'true: time is on /clock'),
}

ARGUMENTS = [
    DeclareLaunchArgument('image', default_value='/camera/image_raw', description='image topic'),
    DeclareLaunchArgument(
        'camera_info', default_value='', description='its camera_info; empty: beside the image'
    ),
    DeclareLaunchArgument(
        'namespace', default_value='kp2d', description='of the node and of what it publishes'
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
        'camera', default_value='false', description='true: start the camera node as well'
    ),
    DeclareLaunchArgument(
        'source',
        default_value='',
        description='of the camera node: a folder, video, bag, webcam; empty: a moving view',
    ),
    DeclareLaunchArgument(
        'local',
        default_value='false',
        description='true: all is on this machine; use the Fast DDS profile for large images',
    ),
    DeclareLaunchArgument(
        'debug', default_value='false', description='true: log more, and show it in RViz'
    ),
]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    def text(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    def flag(name: str) -> bool:
        return is_true(name, text(name))

    namespace, image = text('namespace'), text('image')
    camera_info = text('camera_info') or ''.join(image.rpartition('/')[:2]) + 'camera_info'
    actions: list[LaunchDescriptionEntity] = []
    if flag('local'):
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
            parameters=[text('params_file'), given_parameters(text)],
            remappings=[
                ('image', image),
                ('image/compressed', f'{image}/compressed'),
                ('camera_info', camera_info),
            ],
            ros_arguments=['--log-level', f'{logger(namespace)}:=debug'] if flag('debug') else [],
        )
    )
    if flag('camera'):
        actions.append(
            Node(
                package='kp2d_ros',
                executable='camera_node',
                name='camera_node',
                namespace=namespace,
                output='screen',
                parameters=[{'source': text('source')}, given_parameters(text, ['use_sim_time'])],
                remappings=[
                    ('image', image),
                    ('image/compressed', f'{image}/compressed'),
                    ('camera_info', camera_info),
                ],
            )
        )
    if flag('debug'):
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


def given_parameters(text, arguments=tuple(PARAMETERS)) -> dict[str, bool | int | str]:
    """Those that the user gave: they go before the parameter file's."""
    values: dict[str, bool | int | str] = {}
    for argument in arguments:
        parameter, kind, _ = PARAMETERS[argument]
        value = text(argument)
        if value:
            values[parameter] = is_true(argument, value) if kind is bool else kind(value)
    return values


def is_true(name: str, value: str) -> bool:
    if value.lower() not in ('true', 'false', '1', '0'):
        raise ValueError(f"{name} is 'true' or 'false', not '{value}'")
    return value.lower() in ('true', '1')


def logger(namespace: str) -> str:
    return f'{namespace.strip("/").replace("/", ".")}.keypoint_node'.lstrip('.')
