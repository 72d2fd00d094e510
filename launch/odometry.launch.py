"""Pose, path and map of a camera: ros2 launch kp2d_ros odometry.launch.py image:=/camera/image_raw

This starts the keypoint node and the odometry node. With one camera, the scale is arbitrary unless
you set its height above a flat ground in metres: camera_height:=1.2. With stereo:=true, poses are
in metres.
"""

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from kp2d_ros import launching as kp2d

# Arguments that are parameters of the keypoint node; empty: keep the value of the parameter file.
PARAMETERS = {
    'image_transport': ('image_transport', str, 'raw, compressed, or the name of a plugin'),
    'model': ('model', str, 'auto, small, fast, half, a .safetensors or .onnx file'),
    'runtime': ('runtime', str, 'inference runtime: auto, openvino, onnxruntime, tensorrt, ...'),
    'threads': ('threads', int, 'CPU threads; 0: the runtime decides'),
    'size': ('working_size', int, 'longer side of resized images, in pixels; 0: do not resize'),
    'max_keypoints': ('max_keypoints', int, 'keep at most this many keypoints'),
}
# Arguments that are parameters of the odometry node; empty: as above.
ODOMETRY_PARAMETERS = {
    'camera_height': ('camera_height', float, 'metres above a flat ground; sets the scale'),
    'odom_frame': ('odom_frame', str, 'reference frame of the published poses'),
    'base_frame': ('base_frame', str, 'frame whose poses are published'),
    'tf': ('tf', ('none', 'odom', 'all'), 'transforms on /tf: none, odom or all'),
    'save_folder': ('save_folder', str, 'folder where save_map writes'),
}
# Arguments that are parameters of both nodes.
BOTH = {
    'managed': ('managed', bool, 'true: wait for lifecycle transitions'),
    'use_sim_time': ('use_sim_time', bool, 'true: take the time from /clock'),
}

ARGUMENTS = [
    DeclareLaunchArgument(
        'image',
        default_value='camera/image_raw',
        description="image topic; a relative name starts at the parent of the nodes' namespace",
    ),
    DeclareLaunchArgument(
        'camera_info', default_value='', description='camera_info topic; empty: next to the image'
    ),
    DeclareLaunchArgument(
        'stereo', default_value='false',
        description='true: use a rectified stereo pair, left and right, instead of image',
    ),
    DeclareLaunchArgument(
        'left', default_value='left/image_rect',
        description='image topic of the left camera; camera_info is next to it',
    ),
    DeclareLaunchArgument(
        'right', default_value='right/image_rect',
        description='image topic of the right camera; camera_info is next to it',
    ),
    DeclareLaunchArgument(
        'namespace', default_value='kp2d', description='namespace of the nodes and topics'
    ),
    DeclareLaunchArgument(
        'params_file',
        default_value=str(kp2d.SHARE / 'config' / 'keypoints.yaml'),
        description='parameters of the keypoint node',
    ),
    DeclareLaunchArgument(
        'odometry_params_file',
        default_value=str(kp2d.SHARE / 'config' / 'odometry.yaml'),
        description='parameters of the odometry node',
    ),
    *(
        DeclareLaunchArgument(name, default_value='', description=description)
        for name, (_, _, description) in {**PARAMETERS, **ODOMETRY_PARAMETERS, **BOTH}.items()
    ),
    DeclareLaunchArgument(
        'vins_features', default_value='false',
        description='true: also publish feature_tracker/feature for VINS-Fusion',
    ),
    DeclareLaunchArgument(
        'local',
        default_value='false',
        description='true: all nodes run on this machine, use the Fast DDS profile for large '
        'messages',
    ),
    DeclareLaunchArgument(
        'respawn', default_value='true', description='false: do not restart a node that died'
    ),
    DeclareLaunchArgument(
        'rviz', default_value='false', description='true: show the path and the map in RViz'
    ),
]  # fmt: skip


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """Check all arguments, then return the nodes to start."""

    def text(name: str) -> str:
        return LaunchConfiguration(name).perform(context)

    def flag(name: str) -> bool:
        return bool(kp2d.checked(name, text(name), bool))

    pushed = context.launch_configurations.get('ros_namespace', '')
    namespace = kp2d.absolute(text('namespace'), pushed)
    both = kp2d.given_parameters(text, BOTH)
    keypoints = {**kp2d.given_parameters(text, PARAMETERS), **both}
    odometry = {**kp2d.given_parameters(text, ODOMETRY_PARAMETERS), **both}
    params_file = kp2d.existing_file('params_file', text('params_file'))
    odometry_file = kp2d.existing_file('odometry_params_file', text('odometry_params_file'))
    respawn = kp2d.respawning(text)
    local, rviz, vins = flag('local'), flag('rviz'), flag('vins_features')
    shown = 'debug_image'
    if flag('stereo'):
        shown = 'left/debug_image'
        keypoints['cameras'], odometry['stereo'] = ['left', 'right'], True
        images, inputs = stereo_remappings(text, namespace)
    else:
        images, inputs = mono_remappings(text, namespace)
    if rviz:
        kp2d.require_package('rviz', 'rviz2')

    def node(name: str, parameters: list, remappings: list) -> Node:
        return Node(
            package='kp2d_ros', executable=name, name=name, namespace=namespace, output='screen',
            parameters=parameters, remappings=remappings, **respawn,
        )  # fmt: skip

    actions: list[LaunchDescriptionEntity] = kp2d.fastdds_profile() if local else []
    actions.append(node('keypoint_node', [params_file, keypoints], images))
    actions.append(node('odometry_node', [odometry_file, odometry], inputs))
    if vins:
        sim_time = {k: v for k, v in both.items() if k == 'use_sim_time'}
        actions.append(node('vins_node', [sim_time], [r for r in inputs if r[0] == 'keypoints']))
    if rviz:
        actions.append(
            Node(
                package='rviz2', executable='rviz2', namespace=namespace,
                arguments=['-d', str(kp2d.SHARE / 'config' / 'odometry.rviz')],
                remappings=[
                    ('/kp2d/debug_image', shown),
                    *((f'/kp2d/{topic}', topic) for topic in ('odometry', 'path', 'map_points')),
                ],
            )
        )  # fmt: skip
    return actions


def mono_remappings(text, namespace: str) -> tuple[list, list]:
    """Return the remappings of the keypoint node and of the odometry node."""
    beside = kp2d.parent(namespace)
    image = kp2d.absolute(text('image'), beside)
    camera_info = kp2d.absolute(text('camera_info') or f'{kp2d.parent(image)}/camera_info', beside)
    return kp2d.camera_remappings(image, camera_info), [('camera_info', camera_info)]


def stereo_remappings(text, namespace: str) -> tuple[list, list]:
    """Likewise for a pair. The odometry node takes its keypoints from the left camera."""
    images, inputs = [], [('keypoints', 'left/keypoints')]
    for side, prefix in (('left', ''), ('right', 'right/')):
        image = kp2d.absolute(text(side), kp2d.parent(namespace))
        camera_info = f'{kp2d.parent(image)}/camera_info'
        images += kp2d.camera_remappings(image, camera_info, f'{side}/')
        inputs.append((f'{prefix}camera_info', camera_info))
    return images, inputs
