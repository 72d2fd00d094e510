"""A camera for machines without a driver: publishes pictures of a source at a set rate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
from rclpy.clock import Clock
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.task import Future
from sensor_msgs.msg import CameraInfo, CompressedImage
from sensor_msgs.msg import Image as ImageMessage
from std_msgs.msg import Header

from kp2d_core.camera import read_calibration, read_out, scaled, uncalibrated_info
from kp2d_core.images import Size, resize, size_of
from kp2d_ros.bridge import image_message, jpeg_message
from kp2d_ros.camera.moving_view import Picture
from kp2d_ros.camera.sources import Damage, open_source
from kp2d_ros.compat import ClockType
from kp2d_ros.process import run_node

DEFAULT_RATE = 30.0
ENCODINGS = ('rgb8', 'bgr8', 'mono8')


class CameraNode(Node):
    def __init__(
        self, name: str = 'camera_node', *, namespace: str = 'camera', **options: Any
    ) -> None:
        super().__init__(name, namespace=namespace, **options)
        self.finished = Future()  # done with an exit code after the last picture
        source = str(
            self._declare(
                'source',
                '',
                'Images to publish: a folder, image, video, bag, webcam, the number of a webcam, '
                'or scene: a camera moves through a room; empty: scene.',
                dynamic_typing=True,
            )
        )
        topic = self._declare('topic', '', 'Image topic of a bag; empty: the first one.')
        rate = self._declare(
            'rate',
            0.0,
            'Frame rate in Hz; 0: as recorded, 20 for scene, else 30.',
            range=(0.0, 1000.0),
        )
        self._loop = self._declare('loop', True, 'Start again after the last image.')
        width = self._declare('width', 0, 'Image width; 0: do not resize.', range=(0, 16384))
        height = self._declare('height', 0, 'Image height; 0: do not resize.', range=(0, 16384))
        self._encoding = self._declare(
            'encoding', 'rgb8', f'Encoding of image_raw: {", ".join(ENCODINGS)}.'
        )
        self._frame_id = self._declare(
            'frame_id', 'camera_optical_frame', 'frame_id of the published headers.'
        )
        calibration = self._declare(
            'calibration',
            '',
            'Calibration file (YAML of camera_calibration) to publish as camera_info.',
        )
        reliable = self._declare(
            'reliable',
            True,
            'Publish with reliable QoS, which reliable and best-effort subscribers accept.',
        )
        if self._encoding not in ENCODINGS:
            raise ValueError(f'encoding must be one of {", ".join(ENCODINGS)}')
        if bool(width) != bool(height):
            raise ValueError('give both width and height, or neither')

        self._size = (width, height) if width else None
        self._source = open_source(source, size=self._size, topic=topic)
        self._info = read_calibration(calibration) if calibration else None
        self._pictures = self._source.pictures()
        self._shown = False  # any of them
        qos = QoSProfile(
            depth=5,
            reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        )
        self._image = self.create_publisher(ImageMessage, 'image_raw', qos)
        self._compressed = self.create_publisher(CompressedImage, 'image_raw/compressed', qos)
        self._camera_info = self.create_publisher(CameraInfo, 'camera_info', qos)
        rate = rate or self._source.rate or DEFAULT_RATE
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = self.create_timer(1 / rate, self._tick, clock=steady)
        self.get_logger().info(
            f'{self._source.description} at {rate:g} Hz on {self.resolve_topic_name("image_raw")}'
        )

    def _declare(
        self,
        name: str,
        default: Any,
        description: str,
        range: tuple[float, float] | None = None,
        **options: Any,
    ) -> Any:
        descriptor = ParameterDescriptor(description=description, read_only=True, **options)
        if range is not None and isinstance(default, float):
            descriptor.floating_point_range = [
                FloatingPointRange(from_value=range[0], to_value=range[1])
            ]
        elif range is not None:
            low, high = (int(bound) for bound in range)
            descriptor.integer_range = [IntegerRange(from_value=low, to_value=high, step=1)]
        return self.declare_parameter(name, default, descriptor).value

    def _tick(self) -> None:
        picture = next(self._pictures, None)
        if picture is None and self._loop and self._shown:
            self._pictures = self._source.pictures()
            picture = next(self._pictures, None)
        if picture is None:
            self._timer.cancel()
            if not self._shown:
                self.get_logger().error(f'{self._source.description} has no usable picture')
            self.finished.set_result(0 if self._shown else 1)
        elif isinstance(picture, Damage):
            self.get_logger().warning(picture)
        else:
            self._shown = True
            self._publish(picture)

    def _publish(self, picture: Picture) -> None:
        image = picture.image
        header = Header(frame_id=self._frame_id, stamp=self.get_clock().now().to_msg())
        if self._size is not None and size_of(image) != self._size:
            image = resize(image, self._size)
        info = self._info_of(picture, size_of(image))
        self._camera_info.publish(
            CameraInfo(
                header=header, width=int(info.width), height=int(info.height),
                distortion_model=info.distortion_model,
                k=_floats(info.k), d=_floats(info.d), r=_floats(info.r), p=_floats(info.p),
            )
        )  # fmt: skip
        self._image.publish(image_message(header, image, self._encoding))
        if self._compressed.get_subscription_count():
            self._compressed.publish(jpeg_message(header, image, 90))

    def _info_of(self, picture: Picture, size: Size) -> Any:
        """The calibration of a picture that is published in this size."""
        info = self._info or picture.info
        if info is None or not info.k[0]:
            return uncalibrated_info(size)
        width, height = size_of(picture.image)
        if (info.width, info.height) != (width, height):
            info = read_out(info)
        sizes = (
            f'the calibration is for {info.width}x{info.height} pixels, '
            f'the pictures have {width}x{height}'
        )
        # Less than a pixel apart, so that a size may have been rounded.
        same_shape = abs(info.width * height - info.height * width) < info.width
        if (info.width, info.height) != size and not same_shape:
            self.get_logger().warning(f'{sizes}: camera_info is left uncalibrated', once=True)
            return uncalibrated_info(size)
        if (info.width, info.height) not in (size, (width, height)):
            self.get_logger().info(f'{sizes}: it is scaled', once=True)
        return scaled(info, size)


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]


def main(arguments: Sequence[str] | None = None) -> int:
    return run_node(CameraNode, arguments)


if __name__ == '__main__':
    sys.exit(main())
