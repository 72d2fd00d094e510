"""The odometry node: a lifecycle node that publishes odometry, path and map from keypoints."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, PointCloud2
from std_msgs.msg import String
from std_srvs.srv import Trigger

from kp2d_core.checks import parse_json
from kp2d_core.errors import FileError
from kp2d_core.odometry import State
from kp2d_core.odometry.words import find_words
from kp2d_ros import parameters
from kp2d_ros.compat import (
    ClockType,
    SubscriptionEventCallbacks,
    on_parameters,
    publisher_counter,
)
from kp2d_ros.inputs import QUIET
from kp2d_ros.lifecycle import FAILURE, SUCCESS, PatientLifecycleNode, logged
from kp2d_ros.messages import LATCHED, keypoints_from_cloud
from kp2d_ros.odometry.follower import Follower, Source, Step
from kp2d_ros.odometry.outputs import OdometryOutputs, TFMessage
from kp2d_ros.odometry.report import ARBITRARY, SLOW, OdometryHealth, status
from kp2d_ros.odometry.settings import ODOMETRY_TABLE, OdometrySettings, changed
from kp2d_ros.odometry.worker import FollowerThread, Job
from kp2d_ros.process import run_node
from kp2d_ros.stereo import Pairing

SIDES = ('', 'right/')  # prefixes of the topics; the second only with stereo


class OdometryNode(PatientLifecycleNode):
    """configure creates the publishers, activate subscribes, cleanup deletes the map."""

    def __init__(
        self, name: str = 'odometry_node', *, namespace: str = 'kp2d', **options: Any
    ) -> None:
        super().__init__(name, namespace=namespace, **options)
        values = parameters.declare_table(self, ODOMETRY_TABLE)
        self._settings = changed(OdometrySettings(), values)
        on_parameters(self, self._check, self._parameters_changed)

        self._follower: Follower | None = None
        self._outputs: OdometryOutputs | None = None
        self._thread: FollowerThread | None = None
        self._subscriptions_: list[Any] = []
        self._infos: dict[int, CameraInfo] = {}  # by side
        self._source = Source()
        self._health = OdometryHealth(topic=self.resolve_topic_name('keypoints'))
        self._since: dict[str, float] = {}  # event -> time.monotonic()
        self._finished_at: deque[float] = deque(maxlen=60)
        self._took: deque[float] = deque(maxlen=60)
        self._map_due = 0.0
        self._untold: int | None = None  # stamp of the last frame, until path and map show it
        self._scale_known = False

        self.create_service(Trigger, '~/reset', self._reset)
        self.create_service(Trigger, '~/save_map', self._save_map)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # sim time may stop
        period = self._settings.diagnostics_period
        self._report_timer = self.create_timer(period, self._report, clock=steady)
        if not self._settings.managed:
            self._start_timer = self.create_timer(0.0, self._start, clock=steady)

    # Lifecycle

    @logged
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._follower = Follower(self._settings)
        self._health.resets = self._follower.resets
        self._outputs = OdometryOutputs(self, self._settings)
        if self._settings.tf == 'none':
            self._health.note = 'switched off'
        elif TFMessage is None:
            self._health.note = 'not published: tf2_msgs is not installed'
            self.get_logger().warning('tf2_msgs is not installed: nothing is published on /tf')
        return SUCCESS

    @logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        result = super().on_activate(state)
        self._since['active'] = time.monotonic()
        self._thread = FollowerThread(
            self._work, self._count, self._problem, self._settings.queue_size
        )
        self._pairing: Pairing[PointCloud2] = Pairing(2)
        try:
            self._subscribe()
        except Exception as error:  # rclpy would swallow it
            self._stop()
            self.get_logger().error(f'cannot subscribe: {error}')
            super().on_deactivate(state)
            return FAILURE
        for name in parameters.unknown_qos_overrides(self):
            self.get_logger().warning(f"no topic has the QoS override '{name}': it has no effect")
        self._health.active = True
        self.get_logger().info(f'waiting for keypoints on {self._health.topic}')
        return result

    @logged
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._stop()
        return super().on_deactivate(state)

    @logged
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._free()
        return super().on_cleanup(state)

    @logged
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._stop()
        self._free()
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Return to unconfigured after a transition raised an error."""
        self._stop()
        self._free()
        return SUCCESS

    def destroy_node(self) -> None:
        self._stop()
        self._free()
        super().destroy_node()

    def _start(self) -> None:
        self._start_timer.cancel()
        self.start_by_itself()

    def _stop(self) -> None:
        self._health.active = False
        for subscription in self._subscriptions_:
            self.destroy_with(partial(self.destroy_subscription, subscription))
        self._subscriptions_ = []
        if self._thread is not None:
            self._thread.stop(timeout=60.0 if self.context.ok() else 0.4)
        self._thread = None

    def _free(self) -> None:
        if self._outputs is not None:
            self.destroy_with(self._outputs.destroy)
        self._outputs = self._follower = None
        self._health.last = None
        self._infos.clear()
        self._source = Source()

    # Input

    def _subscribe(self) -> None:
        settings = self._settings
        reliable = QoSProfile(depth=settings.queue_size, reliability=ReliabilityPolicy.RELIABLE)
        # A volatile subscription receives from every publisher. A latched one also receives
        # what a latched publisher sent earlier.
        volatile = QoSProfile(
            depth=1,
            reliability=ReliabilityPolicy.BEST_EFFORT,
            durability=DurabilityPolicy.VOLATILE,
        )
        quiet = SubscriptionEventCallbacks(use_default_callbacks=False)
        for side, prefix in enumerate(SIDES[: 2 if settings.stereo else 1]):
            topic = f'{prefix}keypoints'
            overrides = parameters.qos_overrides(self, topic, 'subscription')
            self._subscriptions_.append(
                self.create_subscription(
                    PointCloud2,
                    topic,
                    partial(self._arrived, side),
                    reliable,
                    qos_overriding_options=overrides,
                )
            )
            for qos in (volatile, LATCHED):
                self._subscriptions_.append(
                    self.create_subscription(
                        CameraInfo,
                        f'{prefix}camera_info',
                        partial(self._infos.__setitem__, side),
                        qos,
                        event_callbacks=quiet,
                    )
                )

        self._subscriptions_.append(
            self.create_subscription(
                String, 'info', self._described, LATCHED, event_callbacks=quiet
            )
        )

    def _described(self, message: String) -> None:
        """Find the visual words of the model that the keypoint node runs."""
        self._source, problem = source_of(message.data)
        self._health.words = OdometryHealth.words if self._source.words is None else 'of the model'
        if problem:
            self.get_logger().warning(f'visual words are learned from the frames: {problem}')

    def _arrived(self, side: int, cloud: PointCloud2) -> None:
        now = self._since['keypoints'] = time.monotonic()
        clouds: list[Any] | None = [cloud]
        if self._settings.stereo:
            tolerance = round(self._settings.sync_tolerance * 1e9)
            stamp = nanoseconds(cloud.header.stamp)
            clouds, unpaired = self._pairing.add(side, stamp, cloud, tolerance)
            self._count('unpaired', unpaired)
        if clouds is None or self._thread is None:
            return
        self._count('received')
        infos = [self._infos.get(number) for number in range(len(clouds))]
        if any(info is None for info in infos):
            self._count('damaged')
            self._problem('damaged', 'keypoints arrived, but no camera_info yet')
            return
        dropped = self._thread.submit(Job(clouds, infos, now, self._source))
        if dropped:
            self._health.overflow += dropped
            self.get_logger().warning(SLOW, throttle_duration_sec=QUIET)

    # Processing, in the thread

    def _work(self, job: Job) -> None:
        follower, outputs = self._follower, self._outputs
        if follower is None or outputs is None:
            return
        keypoints = [keypoints_from_cloud(cloud) for cloud in job.clouds]
        header = job.clouds[0].header
        began = time.monotonic()
        step = follower.update(keypoints, job.infos, nanoseconds(header.stamp), job.source)
        if step is None:
            self._count('repeated')
            return
        if step.base is not None:
            outputs.publish(step, header.frame_id)
        now = time.monotonic()
        self._untold = step.stamp
        if now >= self._map_due:
            self._publish_map()
        self._since['keypoints'] = now  # no warning of missing keypoints while frames are queued
        self._took.append(now - began)
        self._finished_at.append(now)
        self._tell(step, now)

    def _publish_map(self) -> None:
        """Publish path and map of the last frame."""
        follower, outputs, stamp = self._follower, self._outputs, self._untold
        if follower is None or outputs is None or stamp is None:
            return
        self._untold = None
        self._map_due = time.monotonic() + self._settings.map_period
        outputs.publish_map(follower, stamp, self._settings.map_radius)

    def _tell(self, step: Step, now: float) -> None:
        """Log each change of state once. Also log when the scale becomes known."""
        estimate, before = step.estimate, self._health.last
        self._health.last = estimate
        placed = estimate.pose is not None
        self._count('placed' if placed else str(estimate.state))
        if placed and not self._health.tracked:
            self._health.tracked = True
            self._since['tracked'] = now
            if not step.scale_known and not self._settings.camera_height:
                self.get_logger().warning(ARBITRARY)
        if estimate.state == State.NEW_MAP:
            self._since['map'] = now
            self._scale_known = False
        if step.scale_known and not self._scale_known:
            assert self._follower is not None
            self.get_logger().info(f'the scale is known: {self._follower.scale}')
        self._scale_known = step.scale_known
        if before is not None and before.state == estimate.state:
            return
        self._since['state'] = now
        if before is not None and (before.state, estimate.state) == (
            State.NEW_MAP,
            State.TRACKING,
        ):
            return
        sentence = f'{estimate.state} (map {estimate.map_number})'
        if estimate.state == State.LOST:
            self.get_logger().warning(f'{sentence}: no pose is published until it is found again')
        else:
            self.get_logger().info(sentence)

    def _count(self, kind: str, number: int = 1) -> None:
        self._health.frames[kind] += number

    def _problem(self, kind: str, sentence: str) -> None:
        if not self.context.ok():  # an error during shutdown is not worth a report
            return
        self._health.problem = self._health.last_problem = sentence.splitlines()[0]
        self._health.failed = kind == 'failed'
        if kind == 'failed':
            self.get_logger().error(sentence, throttle_duration_sec=QUIET)
        else:
            self.get_logger().warning(f'frame refused: {sentence}', throttle_duration_sec=QUIET)

    # Diagnostics, parameters, services

    def _report(self) -> None:
        health, now = self._health, time.monotonic()

        def ago(what: str) -> float | None:
            return now - self._since[what] if what in self._since else None

        health.active_for = ago('active') or 0.0
        health.since_keypoints = ago('keypoints')
        health.in_state_for = ago('state') or 0.0
        health.map_age = ago('map')
        health.tracked_for = ago('tracked') or 0.0
        sides = 2 if self._settings.stereo else 1
        health.has_camera_info = len(self._infos) >= sides
        if self._subscriptions_:
            health.publishers = publisher_counter(self, self._subscriptions_[0])()
        if self._follower is not None:
            health.scale = self._follower.scale
        recent = [when for when in list(self._finished_at) if now - when < 5.0]
        span = recent[-1] - recent[0] if recent else 0.0
        health.rate = (len(recent) - 1) / span if span > 0 else 0.0
        health.update_ms = 1e3 * float(np.median(list(self._took))) if self._took else 0.0
        message = DiagnosticArray()
        message.header.stamp = self.get_clock().now().to_msg()
        message.status = [status(self.get_fully_qualified_name().lstrip('/'), health)]
        self._diagnostics.publish(message)
        if health.active and now >= self._map_due:  # no frame has arrived since it was due
            self._publish_map()
        health.problem, health.failed, health.overflow = '', False, 0

    def _check(self, changes: Sequence[Any]) -> SetParametersResult:
        for change in changes:
            entry = ODOMETRY_TABLE.get(change.name)
            problem = entry.limits.check(change.name, change.value) if entry else None
            if problem is not None:
                return SetParametersResult(successful=False, reason=problem)
        return SetParametersResult(successful=True)

    def _parameters_changed(self, changes: Sequence[Any]) -> None:
        known = {change.name: change.value for change in changes}
        self._settings = changed(self._settings, known)

    def _reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._follower is None:
            response.message = 'the node is not configured'
            return response
        self._follower.reset('asked for')
        self._health.last = None
        response.success, response.message = True, 'map and path restart with the next frame'
        return response

    def _save_map(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._follower is None:
            response.message = 'the node is not configured'
            return response
        name = f'{datetime.now():%Y%m%d-%H%M%S}'
        folder = Path(self._settings.save_folder).expanduser()
        try:
            paths = self._follower.save(folder, name)
        except (ValueError, FileError) as error:
            response.message = str(error)
            return response
        unit = '' if self._follower.scale.startswith('metres') else ' (the scale is arbitrary)'
        response.success = True
        response.message = f'wrote {" and ".join(map(str, paths))}{unit}'
        return response


def source_of(text: str) -> tuple[Source, str]:
    """Read a message of `info`; also return why the words of its model cannot be used, if so."""
    source = Source()
    try:
        facts = parse_json(text)
        if not isinstance(facts, dict):
            raise ValueError('info does not describe a model')
        source = Source(str(facts.get('weights', '')))
        words = find_words(str(facts.get('model', '')), source.digest)
    except (ValueError, OSError, FileError) as error:
        return source, str(error)
    return (source if words is None else Source(source.digest, words.values)), ''


def nanoseconds(stamp: Any) -> int:
    return int(stamp.sec) * 10**9 + int(stamp.nanosec)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_node(OdometryNode, arguments)


if __name__ == '__main__':
    sys.exit(main())
