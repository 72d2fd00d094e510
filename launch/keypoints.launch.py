"""Keypoints of one camera: ros2 launch kp2d_ros keypoints.launch.py image:=/camera/image_raw

For several cameras, launch it once per camera, each with its own namespace, such as
namespace:=/front/kp2d. For a stereo pair, use stereo.launch.py.
"""

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from kp2d_ros import launching as kp2d

ARGUMENTS = [
    DeclareLaunchArgument(
        'image',
        default_value='camera/image_raw',
        description="image topic; a relative name starts at the parent of the node's namespace",
    ),
    DeclareLaunchArgument(
        'camera_info', default_value='', description='camera_info topic; empty: next to the image'
    ),
    *kp2d.common_arguments(),
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
        'rviz',
        default_value='false',
        description='true: show the overlay and the keypoints in RViz',
    ),
]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """Check all arguments, then return the nodes to start."""

    def text(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    def flag(name: str) -> bool:
        return kp2d.checked(name, text(name), bool)

    pushed = context.launch_configurations.get('ros_namespace', '')
    namespace = kp2d.absolute(text('namespace'), pushed)
    around = kp2d.parent(namespace)
    image = kp2d.absolute(text('image'), around)
    beside = f'{kp2d.parent(image)}/camera_info'
    camera_info = kp2d.absolute(text('camera_info') or beside, around)
    node = kp2d.keypoint_node(text, namespace, kp2d.camera_remappings(image, camera_info))
    camera, rviz = flag('camera'), flag('rviz')
    local = camera if text('local') == 'auto' else flag('local')
    if rviz:
        kp2d.require_package('rviz', 'rviz2')

    actions: list[LaunchDescriptionEntity] = kp2d.fastdds_profile() if local else []
    actions.append(node)
    if camera:
        given = kp2d.given_parameters(text)
        sim_time = {name: value for name, value in given.items() if name == 'use_sim_time'}
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
                **kp2d.respawning(text),
            )
        )
    if rviz:
        actions.append(
            Node(
                package='rviz2',
                executable='rviz2',
                namespace=namespace,
                arguments=['-d', str(kp2d.SHARE / 'config' / 'keypoints.rviz')],
                remappings=[
                    ('/kp2d/debug_image', 'debug_image'),
                    ('/kp2d/keypoints', 'keypoints'),
                ],
            )
        )
    return actions
