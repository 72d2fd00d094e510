"""Publish a webcam or a video as a ROS 2 camera: python camera.py 0, or FILM.mp4

Start the keypoint node: ros2 launch kp2d_ros keypoints.launch.py image:=/camera/image_raw
"""

import sys
from contextlib import suppress

import cv2
import rclpy
from rclpy.executors import ExternalShutdownException
from sensor_msgs.msg import Image

source = sys.argv[1]
video = cv2.VideoCapture(int(source) if source.isdecimal() else source)
rclpy.init()
node = rclpy.create_node('camera')
publisher = node.create_publisher(Image, 'camera/image_raw', 10)


def publish() -> None:
    read, frame = video.read()
    if not read:  # start again
        video.set(cv2.CAP_PROP_POS_FRAMES, 0)
        return
    height, width = frame.shape[:2]
    message = Image(height=height, width=width, encoding='bgr8', step=3 * width)
    message.header.stamp = node.get_clock().now().to_msg()
    message.header.frame_id = 'camera_optical_frame'
    message.data = frame.tobytes()
    publisher.publish(message)


node.create_timer(1 / (video.get(cv2.CAP_PROP_FPS) or 30), publish)
with suppress(KeyboardInterrupt, ExternalShutdownException):
    rclpy.spin(node)
