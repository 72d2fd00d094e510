"""kp2d bag: copy a recording and add keypoints and matches."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from kp2d_core.checks import number, parse_yaml
from kp2d_core.commands.arguments import (
    add_model_arguments,
    add_selection_arguments,
    load_detector,
    scales,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('bag', type=Path, metavar='IN', help='a ROS 2 bag, MCAP or sqlite3')
    parser.add_argument(
        '-o', '--output', type=Path, required=True, metavar='OUT',
        help='bag to write: a folder, or a single file if the name ends in .mcap or .db3',
    )  # fmt: skip
    parser.add_argument(
        '--topic', default='', help='image topic (default: the only topic with images)'
    )
    parser.add_argument(
        '--camera-info', default='', metavar='TOPIC',
        help='camera_info topic (default: camera_info next to the image topic)',
    )  # fmt: skip
    parser.add_argument(
        '--namespace',
        default='/kp2d',
        help='namespace of the added topics keypoints, matches and info',
    )
    parser.add_argument(
        '--storage',
        choices=('mcap', 'sqlite3'),
        help='storage of the output (default: that of the input)',
    )
    add_model_arguments(parser)
    group = parser.add_argument_group('detection and tracking')
    add_selection_arguments(group)
    group.add_argument(
        '--scales', type=scales, default=(1.0,), metavar='A,B,...',
        help='run the network at each of these multiples of the image size (default: 1)',
    )  # fmt: skip
    group.add_argument(
        '-p', '--param', action='append', default=[], metavar='NAME:=VALUE',
        help='set another parameter of the keypoint node, such as descriptor_format:=float32; '
        'may be repeated',
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from kp2d_ros.bags import BagJob, write_bag

    job = BagJob(
        source=args.bag,
        target=args.output,
        settings=settings_of(args),
        topic=args.topic,
        camera_info=args.camera_info,
        namespace=args.namespace,
        storage=args.storage,
    )
    job.check()
    detector = load_detector(args)
    began = time.monotonic()
    with tqdm(unit='frame', disable=None) as bar:

        def complain(sentence: str) -> None:
            bar.write(f'kp2d bag: {sentence}', file=sys.stderr)

        done = write_bag(job, detector, lambda total: _advance(bar, total), complain)
    seconds = time.monotonic() - began
    print(
        f'{done.frames} frames, {done.keypoints} keypoints and {done.matches} matches in '
        f'{seconds:.1f} s ({done.frames / max(seconds, 1e-9):.1f} frames/s), written to '
        f'{args.output}'
    )
    if not done.calibrated:
        print('no calibrated camera_info: the rays assume a nominal focal length')
    return 1 if done.refused else 0


def _advance(bar: Any, total: int) -> None:
    bar.total = total
    bar.update()


def settings_of(args: argparse.Namespace) -> Any:
    """Make the settings of the node; raise ValueError for an unknown parameter or a bad value."""
    from kp2d_ros.settings import FRAME, TABLE, Settings, changed

    values: dict[str, Any] = {
        'max_keypoints': args.max_keypoints,
        'score_threshold': args.score_threshold,
        'nms_radius': float(args.nms_radius),
        'scales': tuple(args.scales),
    }
    for text in args.param:
        name, given, value = text.partition(':=')
        entry = TABLE.get(name)
        if not given:
            raise ValueError(f"--param '{text[:40]}' is not NAME:=VALUE")
        if entry is None or entry.limits.when != FRAME:
            names = ', '.join(entry.name for entry in TABLE.values() if entry.limits.when == FRAME)
            raise ValueError(
                f"'{name[:40]}' is not a parameter that the node can change while it runs: {names}"
            )
        values[name] = _as_type(name, parse_yaml(value), entry.default)
    for name, value in values.items():
        limits = TABLE[name].limits
        problem = limits.check(name, value)
        if problem is not None:
            raise ValueError(problem)
        if limits.range is not None:
            number(value, name, least=limits.range[0], most=limits.range[1])
    return changed(Settings(), values)


def _as_type(name: str, value: Any, default: Any) -> Any:
    """Check the type as ROS does, but accept a whole number for a float."""
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        value = tuple(value)
    if type(value) is not type(default):
        kind = 'list' if isinstance(default, tuple) else type(default).__name__
        raise ValueError(f'{name} must be a {kind}, got {str(value)[:40]!r}')
    return value
