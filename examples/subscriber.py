"""Receive keypoints from the node: python subscriber.py

Start the node: ros2 launch kp2d_ros keypoints.launch.py image:=/camera/image_raw
"""

from contextlib import suppress

import rclpy
from rclpy.executors import ExternalShutdownException
from sensor_msgs.msg import PointCloud2

from kp2d_ros.messages import keypoints_from_cloud, matches_from_cloud


def on_keypoints(cloud: PointCloud2) -> None:
    keypoints = keypoints_from_cloud(cloud)
    known = keypoints.track_ages > 0
    print(f'{len(keypoints.features)} keypoints, {known.sum()} of them seen before', flush=True)


def on_matches(cloud: PointCloud2) -> None:
    points = matches_from_cloud(cloud).points
    inliers = points[points['inlier'] == 1]
    if len(inliers):
        flow = (inliers['u'] - inliers['previous_u']).mean()
        print(f'{len(inliers)} inliers, moved by {flow:+.1f} px to the right', flush=True)


rclpy.init()
node = rclpy.create_node('subscriber')
node.create_subscription(PointCloud2, 'kp2d/keypoints', on_keypoints, 10)
node.create_subscription(PointCloud2, 'kp2d/matches', on_matches, 10)
with suppress(KeyboardInterrupt, ExternalShutdownException):
    rclpy.spin(node)
