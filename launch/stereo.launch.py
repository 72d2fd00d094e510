"""Keypoints of a stereo pair, in one node: ros2 launch kp2d_ros stereo.launch.py

Images are paired by their stamps, and the network processes each pair as one batch. Matches
between the two cameras are published as points on kp2d/right/stereo_matches.
"""

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration

from kp2d_ros import launching as kp2d

ARGUMENTS = [
    DeclareLaunchArgument(
        'left',
        default_value='left/image_raw',
        description='image topic of the left camera; a relative name starts at the parent of the '
        "node's namespace; camera_info is next to the image",
    ),
    DeclareLaunchArgument(
        'right',
        default_value='right/image_raw',
        description='image topic of the right camera; names as for left',
    ),
    *kp2d.common_arguments(),
]


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    def text(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    pushed = context.launch_configurations.get('ros_namespace', '')
    namespace = kp2d.absolute(text('namespace'), pushed)
    remappings = []
    for side in ('left', 'right'):
        image = kp2d.absolute(text(side), kp2d.parent(namespace))
        camera_info = f'{kp2d.parent(image)}/camera_info'
        remappings += kp2d.camera_remappings(image, camera_info, f'{side}/')
    return [kp2d.keypoint_node(text, namespace, remappings, cameras=['left', 'right'])]
