"""`make run`: camera and keypoint node as processes over DDS; figures, overlays, a live page."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kp2d_core.cli import explain
from kp2d_core.commands.arguments import (
    HelpFormatter,
    positive,
    real_number,
    size,
    whole_number,
)
from kp2d_core.files import atomic_write
from kp2d_ros.demo.live_page import LivePage
from kp2d_ros.startup import start_node, use_fastdds_profile

END = 1.5  # seconds that a child may take to end


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog='python -m kp2d_ros.demo.run',
        description='Run a camera and the keypoint node, and watch them.',
        formatter_class=HelpFormatter,
    )
    where = result.add_mutually_exclusive_group()
    where.add_argument(
        '--source', default='scene',
        help="images to show: a folder, image, video, bag, 'webcam', or 'scene': a camera moves "
        'through a room',
    )  # fmt: skip
    where.add_argument(
        '--topic', default='', help='image topic of a running robot, instead of a source'
    )
    result.add_argument('--compressed', action='store_true', help='--topic is compressed')
    result.add_argument(
        '--rate', type=real_number(least=0, most=1000), default=0.0,
        help='frame rate in Hz; 0: as recorded',
    )  # fmt: skip
    result.add_argument('--size', type=size, metavar='WxH', help='image size of the camera')
    result.add_argument('--once', action='store_true', help='stop after the last image')
    result.add_argument('--seconds', type=real_number(least=0), help='stop after this time')
    result.add_argument('--model', default='auto', help='model; see docs/node.md')
    result.add_argument('--runtime', default='auto', help='inference runtime; see docs/node.md')
    result.add_argument('--precision', default='auto', help='auto, fp32, fp16 or int8')
    result.add_argument(
        '--max-keypoints', type=positive, default=1000, metavar='N',
        help='keep at most N keypoints, those with the highest scores',
    )  # fmt: skip
    result.add_argument(
        '--out', type=Path, default=Path('out/run'), help='folder for overlays and logs'
    )
    result.add_argument(
        '--save', type=whole_number(), default=60, metavar='N',
        help='save at most N overlays, one per second',
    )  # fmt: skip
    result.add_argument(
        '--port', type=whole_number(0, 65535), default=0,
        help='port of the live page; 0: any free port',
    )  # fmt: skip
    result.add_argument(
        '--odometry', action=argparse.BooleanOptionalAction, default=None,
        help='follow the camera and draw its path; default: with the scene only, whose camera is '
        'calibrated',
    )  # fmt: skip
    result.add_argument('--no-browser', action='store_true', help='only print the address')
    return result


class Child:
    """A node's process and its log."""

    def __init__(
        self, module: str, folder: Path, parameters: dict[str, Any], remaps: dict[str, str]
    ) -> None:
        self.name = module
        self.log = folder / f'{module}.log'
        rules = [part for a, b in remaps.items() for part in ('-r', f'{a}:={b}')]
        with self.log.open('wb') as file:
            self.process = start_node(module, file, parameters, *rules)

    def last_words(self) -> str:
        return '\n'.join(self.log.read_text(errors='replace').splitlines()[-5:])


def end(children: Sequence[Child]) -> None:
    """End all at once, by force if needed."""
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + END
    for child in children:
        try:
            child.process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def start(args: argparse.Namespace, children: list[Child]) -> None:
    """Start the keypoint node, and a camera unless there is one."""
    image = args.topic or '/camera/image_raw'
    parameters: dict[str, Any] = {
        'model': args.model,
        'runtime': args.runtime,
        'precision': args.precision,
        'max_keypoints': args.max_keypoints,
        'image_transport': 'compressed' if args.compressed else 'raw',
    }
    remaps = {
        'image': image,
        'image/compressed': f'{image}/compressed',
        'camera_info': ''.join(image.rpartition('/')[:2]) + 'camera_info',
    }
    children.append(Child('keypoint_node', args.out, parameters, remaps))
    if not args.topic:
        width, height = args.size or (0, 0)
        parameters = {'source': args.source, 'rate': args.rate, 'loop': not args.once}
        parameters |= {'width': width, 'height': height}
        children.append(Child('camera_node', args.out, parameters, {}))
    wanted = args.odometry if args.odometry is not None else args.source == 'scene'
    if wanted and (args.odometry or (not args.topic and find_spec('nav_msgs') is not None)):
        infos = {'camera_info': remaps['camera_info']}
        children.append(Child('odometry_node', args.out, {'tf': 'all'}, infos))


def line(figures: dict[str, str]) -> str:
    return (
        f'{figures["rate"]:>8}   latency {figures["latency"]} (p95 {figures["latency p95"]})   '
        f'{figures["keypoints"]} keypoints   {figures["matches"]} matches, '
        f'{figures["inliers"]} inliers   dropped {figures["dropped"]}   lost {figures["lost"]}'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if not args.topic:  # a robot's own settings are not to be touched
        os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
        use_fastdds_profile()
    args.out.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, lambda *_: stop.set())
    page = LivePage(args.port)
    children: list[Child] = []
    try:
        start(args, children)
        return watch(args, page, children, stop)
    finally:
        page.close()
        end(children)


def watch(
    args: argparse.Namespace, page: LivePage, children: list[Child], stop: threading.Event
) -> int:
    """Print, save and show figures until stopped, or until a child process ends."""
    import rclpy
    from rclpy.executors import SingleThreadedExecutor
    from rclpy.signals import SignalHandlerOptions

    from kp2d_ros.demo.monitor import Monitor

    rclpy.init(args=[], signal_handler_options=SignalHandlerOptions.NO)
    monitor = Monitor()
    executor = SingleThreadedExecutor()
    executor.add_node(monitor)
    print(f'live page: {page.address}   overlays, logs: {args.out}/   Ctrl-C ends it', flush=True)
    if not args.no_browser and (os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY')):
        webbrowser.open(page.address)
    began = next_line = time.monotonic()
    saved, shown, said = 0, b'', ''
    try:
        while not stop.is_set():
            executor.spin_once(timeout_sec=0.05)
            if monitor.jpeg is not shown:
                shown = monitor.jpeg
                page.show(shown)
            for name, value in page.changes():
                monitor.change(name, value)
            now = time.monotonic()
            if now >= next_line + 1:
                next_line = now
                figures = monitor.figures()
                monitor.remember(figures)
                page.tell(told(monitor) | figures)
                print(line(figures) if figures else f'         {monitor.state()}', flush=True)
                trouble = f'{monitor.level()}: {monitor.state()}' if monitor.troubled() else ''
                if trouble and figures and trouble != said:
                    print(trouble, flush=True)
                said = trouble
                if shown and saved < args.save:
                    saved += 1
                    with atomic_write(args.out / f'overlay-{saved:04}.jpg') as path:
                        path.write_bytes(shown)
            if args.seconds is not None and now - began > args.seconds:
                break
            ended = next((child for child in children if child.process.poll() is not None), None)
            if ended is not None:
                return _after(ended)
        return 0
    finally:
        monitor.destroy_node()
        rclpy.utilities.try_shutdown()


def told(monitor: Any) -> dict[str, Any]:
    """Collect what the page shows next to the table of figures."""
    return {
        'state': monitor.state(),
        'level': monitor.level(),
        'history': list(monitor.history),
        'path': monitor.path,
        'parameters': monitor.parameters(),
        'refused': monitor.refused,
    }


def _after(child: Child) -> int:
    if child.process.returncode == 0:
        print(f'{child.name} has ended')
        return 0
    code = child.process.returncode
    print(f'{child.name} ended with {code}:\n{child.last_words()}', file=sys.stderr)
    return 1


if __name__ == '__main__':
    try:
        sys.exit(main())
    except Exception as error:
        if not explain(error):
            raise
        print(explain(error), file=sys.stderr)
        sys.exit(2)
