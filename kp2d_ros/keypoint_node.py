"""The keypoint node: images in; keypoints, matches and tracks out. A lifecycle node."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rclpy.clock import Clock
from rclpy.impl.implementation_singleton import rclpy_implementation as _rclpy
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.task import Future
from std_msgs.msg import Header
from std_srvs.srv import SetBool, Trigger

from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.image_messages import decode_compressed
from kp2d_core.images import read_image
from kp2d_ros import diagnostics, parameters
from kp2d_ros.bridge import Decoder, image_decoder
from kp2d_ros.compat import ClockType, on_parameters
from kp2d_ros.diagnostics import Health, Statistics
from kp2d_ros.inputs import QUIET, Input, image_topic
from kp2d_ros.messages import Outputs
from kp2d_ros.pipeline import Pipeline, Result
from kp2d_ros.process import run_node
from kp2d_ros.settings import changed
from kp2d_ros.worker import Arrival, Worker


class KeypointNode(LifecycleNode):
    """configure loads the model, activate subscribes, deactivate stops, cleanup frees all."""

    def __init__(
        self, name: str = 'keypoint_node', *, namespace: str = 'kp2d', **options: Any
    ) -> None:
        super().__init__(name, namespace=namespace, **options)
        self.finished = Future()  # done with an exit code if it cannot start by itself
        self.statistics = Statistics()
        self._settings = parameters.declare(self)
        on_parameters(self, parameters.check, self._parameters_changed)

        self._detector: KeypointDetector | None = None
        self._pipeline: Pipeline | None = None
        self._mask: Any = None
        self._outputs: Outputs | None = None
        self._worker: Worker | None = None
        self._input: Input | None = None
        self._enabled = True
        self._health = Health(topic=self.resolve_topic_name(image_topic(self, self._settings)))
        self._reported: dict[str, int] = {}

        self._refuse_impossible_transitions()
        self.create_service(SetBool, 'enable', self._enable)
        self.create_service(Trigger, 'reset_tracks', self._reset_tracks)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # sim time may stand still
        period = self._settings.diagnostics_period
        self._report_timer = self.create_timer(period, self._report, clock=steady)
        if not self._settings.managed:
            self._start_timer = self.create_timer(0.0, self._start, clock=steady)

    # Lifecycle

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        settings = self._settings
        try:
            self._detector = KeypointDetector.load(
                settings.model,
                runtime=settings.runtime,
                precision=settings.precision,
                threads=settings.threads or None,
            )
        except Exception as error:  # a runtime may fail in ways of its own
            self.get_logger().error(f'cannot load the model: {error}')
            return TransitionCallbackReturn.FAILURE
        try:
            self._mask = read_image(settings.mask).max(axis=2) if settings.mask else None
        except FileError as error:
            self._detector = None
            self.get_logger().error(f'cannot load the mask: {error}')
            return TransitionCallbackReturn.FAILURE
        runtime = self._detector.runtime
        self._health.model, self._health.runtime = runtime.model, runtime.description
        self._pipeline = Pipeline(self._detector, self._mask)
        self._outputs = Outputs(self, runtime.model)
        self.get_logger().info(f'loaded {runtime.model}: {runtime.description}')
        if runtime.problem:
            self.get_logger().warning(f'a better runtime does not work: {runtime.problem}')
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        assert self._pipeline is not None and self._outputs is not None
        result = super().on_activate(state)
        decode: Decoder = decode_compressed
        if self._settings.image_transport == 'raw':
            decode, how = image_decoder()
            self.get_logger().info(how, once=True)
        self._worker = Worker(
            self._pipeline,
            decode=decode,
            settings=lambda: self._settings,
            publish=self._publish,
            problem=self._problem,
            trace=self.get_logger().debug,
            statistics=self.statistics,
        )
        self._health.resets = self._worker.pipeline.resets
        try:
            self._input = Input(
                self, self._settings, statistics=self.statistics, arrived=self._frame_arrived
            )
        except Exception as error:  # rclpy would swallow it
            self._stop()
            self.get_logger().error(f'cannot subscribe: {error}')
            super().on_deactivate(state)
            return TransitionCallbackReturn.FAILURE
        for name in parameters.unknown_qos_overrides(self):
            self.get_logger().warning(f"no topic has the QoS override '{name}': it has no effect")
        self._health.active = True
        self.get_logger().info(f'waiting for images on {self._health.topic}')
        return result

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._stop()
        if self._pipeline is not None:
            self._pipeline.reset('deactivated')
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._free()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._stop()
        self._free()
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """A transition threw: back to unconfigured, with nothing left of it."""
        self._stop()
        self._free()
        return TransitionCallbackReturn.SUCCESS

    def destroy_node(self) -> None:
        self._stop()
        self._free()
        super().destroy_node()

    def _refuse_impossible_transitions(self) -> None:
        """rclpy lets its executor die of a request that the present state has no way for."""
        service: Any = self._service_change_state
        change = service.callback

        def change_if_possible(request: Any, response: Any) -> Any:
            try:
                return change(request, response)
            except _rclpy.RCLError as error:
                self.get_logger().warning(f'transition refused: {error}')
                response.success = False
                return response

        service.callback = change_if_possible

    def _start(self) -> None:
        self._start_timer.cancel()
        for transition in (self.trigger_configure, self.trigger_activate):
            if transition() != TransitionCallbackReturn.SUCCESS:
                self.finished.set_result(1)
                return

    def _stop(self) -> None:
        self._health.active = False
        if self._input is not None:
            self._input.close()
        self._input = None
        if self._worker is not None:
            # When the process ends, nobody will see the frame in work.
            self._worker.stop(timeout=60.0 if self.context.ok() else 0.4)
        self._worker = None

    def _free(self) -> None:
        if self._outputs is not None:
            self._outputs.destroy()
        self._outputs = self._detector = self._pipeline = self._mask = None
        self._health.model = self._health.runtime = ''

    def _frame_arrived(self, arrival: Arrival) -> None:
        wanted = self._outputs is not None and self._outputs.wanted()
        if self._worker is not None and self._enabled and wanted:
            self._worker.submit(arrival)
        else:
            self.statistics.count('skipped')

    # Out

    def _publish(self, result: Result, header: Header) -> None:
        if self._outputs is not None:
            self._outputs.publish(
                result, header, self._settings, lambda: self.statistics.summary().rate
            )
            self._check_calibration(result)

    def _check_calibration(self, result: Result) -> None:
        camera, size = result.frame.camera, result.features.image_size
        if camera is None and self._settings.verification == 'essential':
            self._health.uncalibrated = (
                'no calibrated camera_info: matches are verified with the fundamental matrix'
            )
        elif camera is not None and camera.of(size) is None:
            self._health.uncalibrated = (
                f'camera_info is for {camera.size[0]}x{camera.size[1]} images, not '
                f'{size[0]}x{size[1]}: it is not used'
            )
        else:
            self._health.uncalibrated = ''

    def _problem(self, kind: str, sentence: str) -> None:
        if not self.context.ok():  # the end of the process caught the worker at its work
            return
        self._health.last_problem = sentence
        if kind == 'failed':
            self.get_logger().error(sentence, throttle_duration_sec=QUIET)
        else:
            self.get_logger().warning(f'frame refused: {sentence}', throttle_duration_sec=QUIET)

    def _report(self) -> None:
        health = self._health
        health.enabled = self._enabled
        health.wanted = self._outputs is not None and self._outputs.wanted()
        if (camera := self._input) is not None:
            last = camera.last_image
            health.since_image = None if last is None else time.monotonic() - last
            health.publishers = camera.publishers()
            health.incompatible = camera.incompatible
            health.bad_camera_info = camera.bad_camera_info
        name = self.get_fully_qualified_name().lstrip('/')
        message = DiagnosticArray()
        message.header.stamp = self.get_clock().now().to_msg()
        counts, summary = self.statistics.counts(), self.statistics.summary()
        message.status = [diagnostics.status(name, health, counts, summary, self._reported)]
        self._reported = counts
        self._diagnostics.publish(message)

    # Asked for

    def _parameters_changed(self, changes: Sequence[Any]) -> None:
        known = {change.name: change.value for change in changes}
        self._settings = changed(self._settings, known)

    def _enable(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        self._enabled = request.data
        response.success = True
        response.message = 'enabled' if request.data else 'disabled'
        return response

    def _reset_tracks(
        self, request: Trigger.Request, response: Trigger.Response
    ) -> Trigger.Response:
        if self._worker is not None:
            self._worker.reset()
        response.success = self._worker is not None
        response.message = 'tracks begin anew' if response.success else 'the node is not active'
        return response


def main(arguments: Sequence[str] | None = None) -> int:
    return run_node(KeypointNode, arguments)


if __name__ == '__main__':
    sys.exit(main())
