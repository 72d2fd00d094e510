"""The keypoint node, a lifecycle node: from images to keypoints, matches and tracks."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.utilities import get_rmw_implementation_identifier
from std_srvs.srv import SetBool, Trigger

from kp2d_core.detector import KeypointDetector
from kp2d_core.images import decode_compressed, read_image
from kp2d_core.runtimes.base import give_back_memory
from kp2d_ros import diagnostics, parameters
from kp2d_ros.bridge import Decoder, image_decoder
from kp2d_ros.compat import ClockType, on_parameters
from kp2d_ros.diagnostics import Console, Health, summarize
from kp2d_ros.inputs import QUIET, Input, image_topic
from kp2d_ros.lifecycle import FAILURE, SUCCESS, PatientLifecycleNode, logged
from kp2d_ros.outputs import Outputs
from kp2d_ros.pipeline import Pipeline, Statistics, Worker
from kp2d_ros.process import run_node
from kp2d_ros.settings import changed, parse_size

PATIENCE = 5.0  # seconds to wait for the current frame when the node stops


class KeypointNode(PatientLifecycleNode):
    """configure loads the model, activate subscribes, deactivate stops, cleanup frees all."""

    def __init__(
        self, name: str = 'keypoint_node', *, namespace: str = 'kp2d', **options: Any
    ) -> None:
        super().__init__(name, namespace=namespace, **options)
        self.statistics = Statistics()
        self._settings = parameters.declare(self)
        on_parameters(self, self._check_parameters, self._parameters_changed)

        self._pipeline: Pipeline | None = None
        self._outputs: list[Outputs] = []  # one for each camera
        self._inputs: list[Input] = []
        self._worker: Worker | None = None
        self._enabled = True
        self._active_since: float | None = None
        self._loading: tuple[str, float] | None = None  # what, since when
        self._health = Health(
            topic=self._image_topic(),
            middleware=get_rmw_implementation_identifier(),
        )
        self._console = Console(self.get_logger())
        self._reported: dict[str, int] = {}

        self.create_service(SetBool, 'enable', self._enable)
        self.create_service(Trigger, 'reset_tracks', self._reset_tracks)
        self._diagnostics = self.create_publisher(DiagnosticArray, '/diagnostics', 10)
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # sim time may stand still
        period = self._settings.diagnostics_period
        self._report_timer = self.create_timer(period, self._report, clock=steady)
        if not self._settings.managed:
            self._start_timer = self.create_timer(0.0, self._start, clock=steady)

    # Lifecycle

    @logged
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        settings = self._settings
        self._health.topic = self._image_topic()
        prefixes = [f'{name}/' if name else '' for name in settings.cameras]
        try:
            # First: camera_info may arrive while the model is loaded, and has the size.
            for prefix in prefixes:
                self._inputs.append(Input(self, settings, prefix))
            self._loading = 'loading the model', time.monotonic()
            detector = KeypointDetector.load(
                settings.model,
                runtime=settings.runtime,
                precision=settings.precision,
                threads=settings.threads or None,
            )
            mask = read_image(settings.mask).max(axis=2) if settings.mask else None
            self._pipeline = Pipeline(detector, mask, cameras=len(prefixes), in_background=True)
            self._warm_up()
            runtime = detector.runtime
            self._outputs = [
                Outputs(self, runtime, self._rate, prefix, other=number > 0)
                for number, prefix in enumerate(prefixes)
            ]
        except Exception as error:  # a runtime may fail in ways of its own
            self._free()
            if self.context.ok():
                self.get_logger().error(f'cannot be configured: {error}')
            return FAILURE
        finally:
            self._loading = None
        self._health.model, self._health.runtime = runtime.model, runtime.description
        self.get_logger().info(f'loaded {runtime.model}: {runtime.description}')
        if runtime.problem:
            self.get_logger().warning(f'a better runtime does not work: {runtime.problem}')
        return SUCCESS

    def _warm_up(self) -> None:
        """Compile for the image size, if it is known before the first image."""
        assert self._pipeline is not None
        given = parse_size(self._settings.image_size)
        sizes = [size for each in self._inputs if (size := given or each.size) is not None]
        if len(sizes) == len(self._inputs):
            width, height = sizes[0]
            self._loading = f'compiling the model for {width}x{height} images', time.monotonic()
            self._pipeline.prepare(sizes, self._settings)
            self._loading = None

    @logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        assert self._pipeline is not None
        self._warm_up()
        result = super().on_activate(state)
        decode: Decoder = decode_compressed
        if self._settings.image_transport != 'compressed':
            decode, how = image_decoder()
            self.get_logger().info(how, once=True)
        self._worker = Worker(
            self._pipeline,
            decode=decode,
            settings=self._settings,
            outputs=self._outputs,
            problem=self._problem,
            trace=self.get_logger().debug,
            statistics=self.statistics,
        )
        self._worker.enabled = self._enabled
        try:
            for number, each in enumerate(self._inputs):
                each.hear_images(partial(self._worker.submit, number))
        except Exception as error:
            self.get_logger().error(f'cannot subscribe: {error}')
            self._stop()
            super().on_deactivate(state)
            return FAILURE
        for name in parameters.unknown_qos_overrides(self):
            self.get_logger().warning(f"no topic has the QoS override '{name}': it has no effect")
        self._active_since = time.monotonic()
        self.get_logger().info(f'active: waiting for images on {self._health.topic}')
        return result

    @logged
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self._stop():
            return FAILURE
        if self._pipeline is not None:
            self._pipeline.reset('deactivated')
        self.get_logger().info('inactive')
        return super().on_deactivate(state)

    @logged
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._free()
        self.get_logger().info('cleaned up')
        return super().on_cleanup(state)

    @logged
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self._stop():
            return FAILURE
        self._free()
        self.get_logger().info('shut down')
        return super().on_shutdown(state)

    @logged
    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """After an exception in a transition, free everything and become unconfigured."""
        if not self._stop():
            return FAILURE
        self._free()
        return SUCCESS

    def destroy_node(self) -> None:
        # When the process ends, nobody will see the frame in work.
        if self._stop(PATIENCE if self.context.ok() else 0.4):
            self._free()
        super().destroy_node()

    def _start(self) -> None:
        self._start_timer.cancel()
        self.start_by_itself()

    def _stop(self, patience: float = PATIENCE) -> bool:
        """Stop the worker; return False and change nothing if it is stuck in a frame."""
        if self._worker is not None and not self._worker.stop(patience):
            if self.context.ok():
                self.get_logger().error(
                    f'the frame in work is not done after {patience:g} s: it cannot be stopped'
                )
            return False
        self._worker = self._active_since = None
        for each in self._inputs:
            self.destroy_with(each.hear_no_images)
        return True

    def _free(self) -> None:
        for camera, outputs in zip_longest(self._inputs, self._outputs):
            self.destroy_with(camera.close)
            if outputs is not None:
                self.destroy_with(outputs.close)
        self._inputs, self._outputs = [], []
        self._pipeline = camera = outputs = None
        self._health.model = self._health.runtime = ''
        # A worker and its methods hold each other, and it holds the compiled networks, which take
        # tens of megabytes and a few threads each: they are not to wait for Python's own time.
        gc.collect()
        give_back_memory()

    # Frames

    def _image_topic(self) -> str:
        """Of the first camera, for people."""
        name = self._settings.cameras[0]
        prefix = f'{name}/' if name else ''
        return str(self.resolve_topic_name(image_topic(self, self._settings, prefix)))

    def _rate(self) -> float:
        return summarize(self.statistics).rate

    def _problem(self, kind: str, sentence: str) -> None:
        if kind == 'failed':
            time.sleep(0.1)  # the end of the process may have caught the worker at its work
        if not self.context.ok():
            return
        self._health.last_problem = sentence.splitlines()[0]
        if kind == 'failed':
            self.get_logger().error(sentence, throttle_duration_sec=QUIET)
        else:
            self.get_logger().warning(f'frame refused: {sentence}', throttle_duration_sec=QUIET)

    # Diagnostics

    def _report(self) -> None:
        self._look_after_health()
        counts, summary = self.statistics.counts(), summarize(self.statistics)
        since = {name: value - self._reported.get(name, 0) for name, value in counts.items()}
        self._reported = counts
        assessment = diagnostics.assess(self._health, since, summary)
        self._console.tell(assessment)
        name = self.get_fully_qualified_name().lstrip('/')
        message = DiagnosticArray()
        message.header.stamp = self.get_clock().now().to_msg()
        message.status = [diagnostics.status(name, self._health, assessment, counts, summary)]
        self._diagnostics.publish(message)

    def _look_after_health(self) -> None:
        health, now = self._health, time.monotonic()
        # Another thread may change each of them meanwhile.
        cameras, worker, pipeline = [*self._inputs], self._worker, self._pipeline
        active_since, loading = self._active_since, self._loading
        health.active = active_since is not None
        health.active_for = now - active_since if active_since is not None else 0.0
        health.enabled = self._enabled
        health.wanted = worker is not None and worker.wanted()
        for result in worker.latest[:1] if worker is not None else ():
            health.uncalibrated = diagnostics.calibration_fault(result, self._settings)
        if pipeline is not None:
            compiler = pipeline.compiler
            health.resets, health.refused = pipeline.resets, compiler.problem
            if compiler.preparing and loading is None:
                busy = worker.busy_since if worker is not None else None
                loading = f'compiling the model for {compiler.preparing}', busy or now
        health.loading, since = loading if loading is not None else ('', now)
        health.loading_for = now - since
        busy_since = worker.busy_since if worker is not None else None
        health.busy_for = now - busy_since if busy_since is not None else 0.0
        if cameras:  # the one that has been silent for the longest
            camera = min(cameras, key=lambda each: each.last_image or 0.0)
            last = camera.last_image
            health.topic = camera.topic
            health.since_image = None if last is None else now - last
            health.publishers = camera.publishers()
            health.incompatible = camera.incompatible
            health.bad_camera_info = next(filter(None, (c.bad_camera_info for c in cameras)), '')

    # Asked for

    def _check_parameters(self, changes: Sequence[Any]) -> SetParametersResult:
        configured = self._pipeline is not None or self._loading is not None
        return parameters.check(changes, configured)

    def _parameters_changed(self, changes: Sequence[Any]) -> None:
        self._settings = changed(self._settings, {each.name: each.value for each in changes})
        if self._worker is not None:
            self._worker.settings = self._settings

    def _enable(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        self._enabled = request.data
        if self._worker is not None:
            self._worker.enabled = self._enabled
        response.success = True
        response.message = 'enabled' if request.data else 'disabled'
        return response

    def _reset_tracks(
        self, request: Trigger.Request, response: Trigger.Response
    ) -> Trigger.Response:
        worker = self._worker
        if worker is not None:
            worker.reset()
        response.success = worker is not None
        response.message = 'tracks restart' if response.success else 'the node is not active'
        return response


def main(arguments: Sequence[str] | None = None) -> int:
    return run_node(KeypointNode, arguments)


if __name__ == '__main__':
    sys.exit(main())
