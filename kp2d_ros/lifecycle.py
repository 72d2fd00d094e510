"""A lifecycle node whose executor never waits: transitions run in a separate thread."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.impl.implementation_singleton import rclpy_implementation as _rclpy
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.task import Future

SUCCESS, FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE
THREAD_NAME = 'kp2d transition'
PATIENCE = 10.0  # seconds to wait for the next task of the executor
Transition = Callable[[LifecycleState], TransitionCallbackReturn]


class PatientLifecycleNode(LifecycleNode):
    """Answers services while a model loads (seconds) or an engine is built (minutes).

    A request during a transition, or one that the current state does not allow, is refused; the
    latter would end the executor of rclpy.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.finished = Future()  # done with an exit code if it cannot start by itself
        self._under_way = threading.Lock()
        service: Any = self._service_change_state
        # The request stays open until the transition is done; others must not wait behind it.
        service.callback_group = ReentrantCallbackGroup()
        service.callback_group.add_entity(service)
        change = service.callback

        async def change_in_thread(request: Any, response: Any) -> Any:
            def run() -> None:
                try:
                    change(request, response)
                except _rclpy.RCLError as error:
                    self.get_logger().warning(f'transition refused: {_first_line(error)}')
                    response.success = False

            if self._under_way.acquire(blocking=False):
                await self._in_thread(run)
            else:
                self.get_logger().warning('transition refused: another one is under way')
                response.success = False
            return response

        service.callback = change_in_thread

    def start_by_itself(self) -> None:
        """Configure and activate; `finished` is done with 1 if it cannot."""

        def run() -> None:
            for transition in (self.trigger_configure, self.trigger_activate):
                if self.context.ok() and transition() != SUCCESS:
                    self.finished.set_result(1)
                    return

        if self._under_way.acquire(blocking=False):
            self._in_thread(run)

    def destroy_with(self, work: Callable[[], object]) -> None:
        """Run work that destroys entities of the executor, in the thread of the executor.

        From another thread, an entity could disappear while the executor uses it, which ends
        rclpy's executors.
        """
        executor = self.executor
        if executor is None or threading.current_thread().name != THREAD_NAME:
            work()
            return
        claimed, done = threading.Lock(), threading.Event()
        errors: list[Exception] = []

        def run() -> None:
            if claimed.acquire(blocking=False):
                try:
                    work()
                except Exception as error:  # the executor must not see it
                    errors.append(error)
                done.set()

        executor.create_task(run)
        end = time.monotonic() + PATIENCE
        while not done.wait(0.1):
            if not self.context.ok() or time.monotonic() > end:  # nobody spins any more
                run()
        if errors:
            raise errors[0]

    def _in_thread(self, work: Callable[[], None]) -> Future:
        """Done when the work is; `_under_way` is held until then."""
        done = Future()

        def run() -> None:
            try:
                work()
            except _rclpy.RCLError as error:  # somebody else was faster
                self.get_logger().warning(f'transition refused: {_first_line(error)}')
            except Exception:
                if self.context.ok():  # else the end of the process caught it at its work
                    self.get_logger().error(traceback.format_exc())
            finally:
                self._under_way.release()
                done.set_result(None)
                if self.executor is not None:
                    self.executor.wake()

        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
        return done


def logged(transition: Any) -> Any:
    """Log exceptions of a transition callback, which rclpy hides."""

    def call(node: Any, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            return transition(node, state)
        except Exception:
            if node.context.ok():
                node.get_logger().error(f'{transition.__name__}: {traceback.format_exc()}')
            return TransitionCallbackReturn.ERROR

    return call


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
