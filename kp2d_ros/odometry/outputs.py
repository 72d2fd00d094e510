"""Publishers of the odometry node: odometry, path, map points and transforms."""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Point, Pose, PoseStamped, Quaternion, TransformStamped, Vector3
from nav_msgs.msg import Odometry as OdometryMessage
from nav_msgs.msg import Path
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import PointCloud2
from std_msgs.msg import Header

from kp2d_core.geometry import Matrix
from kp2d_core.odometry.geometry import quaternion
from kp2d_ros.clouds import new_cloud
from kp2d_ros.messages import LATCHED
from kp2d_ros.odometry.follower import Follower, Step
from kp2d_ros.odometry.poses import mounting, pose_covariance, twist_covariance
from kp2d_ros.odometry.settings import OdometrySettings
from kp2d_ros.parameters import qos_overrides

TFMessage: Any = None
with suppress(ImportError):  # PyPI has no wheel of tf2_msgs
    TFMessage = import_module('tf2_msgs.msg').TFMessage

POINT_DTYPE = np.dtype([('x', '<f4'), ('y', '<f4'), ('z', '<f4')])
TOPICS: dict[str, type] = {'odometry': OdometryMessage, 'path': Path, 'map_points': PointCloud2}


def time_of(stamp: int) -> Time:
    sec, nanosec = divmod(stamp, 10**9)
    return Time(sec=sec, nanosec=nanosec)


def quaternion_of(rotation: Matrix) -> Quaternion:
    x, y, z, w = (float(value) for value in quaternion(rotation))
    return Quaternion(x=x, y=y, z=z, w=w)


def pose_message(pose: Matrix) -> Pose:
    x, y, z = (float(value) for value in pose[:3, 3])
    return Pose(position=Point(x=x, y=y, z=z), orientation=quaternion_of(pose[:3, :3]))


def vector(values: Matrix) -> Vector3:
    x, y, z = (float(value) for value in values)
    return Vector3(x=x, y=y, z=z)


def transform_message(header: Header, child: str, pose: Matrix) -> TransformStamped:
    result = TransformStamped(header=header, child_frame_id=child)
    result.transform.translation = vector(pose[:3, 3])
    result.transform.rotation = quaternion_of(pose[:3, :3])
    return result


def odometry_message(step: Step, odom_frame: str, base_frame: str) -> OdometryMessage:
    assert step.base is not None
    message = OdometryMessage(
        header=Header(stamp=time_of(step.stamp), frame_id=odom_frame), child_frame_id=base_frame
    )
    message.pose.pose = pose_message(step.base)
    covariance = pose_covariance(step.base, step.way, step.scale_known)
    message.pose.covariance = covariance.ravel()
    if step.twist is None:
        message.twist.covariance = np.diag([1e6] * 6).ravel()  # unknown
        return message
    message.twist.twist.linear = vector(step.twist.linear)
    message.twist.twist.angular = vector(step.twist.angular)
    message.twist.covariance = twist_covariance(step.twist, step.scale_known).ravel()
    return message


def points_cloud(header: Header, points: Matrix) -> PointCloud2:
    cloud, rows = new_cloud(header, POINT_DTYPE, len(points))
    rows['x'], rows['y'], rows['z'] = points.T
    return cloud


class OdometryOutputs:
    """Lifecycle publishers with relative topic names."""

    def __init__(self, node: Any, settings: OdometrySettings) -> None:
        self._node = node
        self._settings = settings
        self._mount = mounting(settings.camera_pose)
        qos = {
            'odometry': QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE),
            'path': LATCHED,  # late subscribers receive the last message at once
            'map_points': LATCHED,
        }
        self._publishers = {
            topic: node.create_lifecycle_publisher(
                kind, topic, qos[topic],
                qos_overriding_options=qos_overrides(node, topic, 'publisher'),
            )
            for topic, kind in TOPICS.items()
        }  # fmt: skip
        self._tf = None
        if settings.tf != 'none' and TFMessage is not None:
            self._tf = node.create_lifecycle_publisher(TFMessage, '/tf', 100)
        self._path = Path(header=Header(frame_id=settings.odom_frame))
        self._path_version = -1
        self._lock = threading.Lock()  # protects the path

    def publish(self, step: Step, camera_frame: str) -> None:
        """Publish the odometry and the transforms of a frame that has a pose."""
        settings = self._settings
        message = odometry_message(step, settings.odom_frame, settings.base_frame)
        self._publishers['odometry'].publish(message)
        if self._tf is not None and step.base is not None:
            transforms = [transform_message(message.header, settings.base_frame, step.base)]
            if settings.tf == 'all' and camera_frame:
                header = Header(stamp=message.header.stamp, frame_id=settings.base_frame)
                transforms.append(transform_message(header, camera_frame, self._mount))
            self._tf.publish(TFMessage(transforms=transforms))

    def publish_map(self, follower: Follower, stamp: int, radius: float) -> None:
        """Publish the path and the map points; may be called from any thread."""
        with self._lock:
            self._publish_map(follower, stamp, radius)

    def _publish_map(self, follower: Follower, stamp: int, radius: float) -> None:
        header = Header(stamp=time_of(stamp), frame_id=self._settings.odom_frame)
        if self._publishers['path'].get_subscription_count():
            self._publishers['path'].publish(self._grown_path(follower, header))
        if self._publishers['map_points'].get_subscription_count():
            points = follower.map_points(radius)
            self._publishers['map_points'].publish(points_cloud(header, points))

    def _grown_path(self, follower: Follower, header: Header) -> Path:
        """Convert only the new poses: conversion takes longer than sending."""
        known = self._path.poses
        version, stamps, poses = follower.path(self._path_version, len(known))
        if version != self._path_version:
            known = []
        self._path_version = version
        for stamp, pose in zip(stamps, poses, strict=True):
            its = Header(stamp=time_of(stamp), frame_id=header.frame_id)
            known.append(PoseStamped(header=its, pose=pose_message(pose)))
        self._path = Path(header=header, poses=known)
        return self._path

    def destroy(self) -> None:
        for publisher in (*self._publishers.values(), self._tf):
            if publisher is not None:
                self._node.destroy_lifecycle_publisher(publisher)
