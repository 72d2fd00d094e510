"""Arguments and argument types that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kp2d_core.checks import MOST, MOST_THREADS, number, whole
from kp2d_core.detector import (
    MOST_RADIUS,
    NMS_RADIUS,
    SCORE_THRESHOLD,
    KeypointDetector,
    check_scales,
)
from kp2d_core.images import MINIMUM_SIDE, MOST_RUN, Size, check_pixels


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to a help text, unless there is none or the text already has it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        present = action.help and '(default' in action.help
        if present or action.default is None or action.default is False or action.default == []:
            return action.help
        if isinstance(action.default, tuple):
            return f'{action.help} (default: {" ".join(map(str, action.default))})'
        return super()._get_help_string(action)


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The same for descriptions and examples that are already wrapped."""


def size(text: str) -> Size:
    """'320x240' -> (320, 240)."""
    try:
        width, height = (int(part) for part in text.lower().split('x'))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text[:40]}' is not a size: WIDTHxHEIGHT, such as 640x480"
        ) from None
    try:
        for side in (width, height):
            whole(side, 'a side', least=MINIMUM_SIDE)
        check_pixels((width, height), MOST_RUN, 'it has')
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' cannot be used: {error}") from None
    return width, height


def scales(text: str) -> tuple[float, ...]:
    """'1,0.5' -> (1.0, 0.5)."""
    try:
        return check_scales([float(part) for part in text.split(',')])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' cannot be used: {error}") from None


def whole_number(least: int = 0, most: int = MOST) -> Callable[[str], int]:
    """Make an argument type: a whole number in range."""

    def parse(text: str) -> int:
        try:
            return whole(int(text) if len(text) < 40 else text, 'it', least=least, most=most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(_one_sentence(text, error)) from None

    return parse


def real_number(
    least: float | None = None, above: float | None = None, most: float | None = None
) -> Callable[[str], float]:
    """Make an argument type: a finite number in range."""

    def parse(text: str) -> float:
        try:
            return number(float(text), 'it', least=least, above=above, most=most)
        except ValueError as error:
            raise argparse.ArgumentTypeError(_one_sentence(text, error)) from None

    return parse


def _one_sentence(text: str, error: ValueError) -> str:
    """Explain why the text is refused, in clearer words than Python's if it is not a number."""
    reason = str(error).partition(', got ')[0]
    return f"'{text[:40]}' cannot be used: {reason if ' must be ' in reason else 'not a number'}"


positive = whole_number(1)
threads = whole_number(1, MOST_THREADS)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('model')
    group.add_argument(
        '--model',
        default='auto',
        help='name of a shipped model, a .safetensors file or an exported model '
        '(default: small, on every machine)',
    )
    group.add_argument(
        '--runtime',
        default='auto',
        help='inference runtime; `kp2d info` lists those of this machine',
    )
    group.add_argument(
        '--precision',
        default='auto',
        help='fp32, fp16 or int8 (default: the fastest with almost no loss of quality on this '
        'machine)',
    )
    group.add_argument(
        '--threads', type=threads, help='CPU threads (default: the runtime decides)'
    )


def add_detection_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('detection')
    group.add_argument(
        '--size', type=size, metavar='WxH',
        help='resize images to this size for the network (default: do not resize)',
    )  # fmt: skip
    add_scales_argument(group)
    add_selection_arguments(group)


def add_selection_arguments(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        '--max-keypoints', type=positive, default=1000, metavar='N',
        help='keep at most N keypoints, those with the highest scores',
    )  # fmt: skip
    group.add_argument(
        '--score-threshold', type=real_number(), default=SCORE_THRESHOLD, metavar='SCORE',
        help='keep keypoints with a score above SCORE (default: %(default)g)',
    )  # fmt: skip
    group.add_argument(
        '--nms-radius', type=real_number(least=0, most=MOST_RADIUS), default=NMS_RADIUS,
        metavar='PX',
        help='non-maximum suppression: drop a keypoint that lies closer than PX pixels to a '
        'better one; 0 keeps all (default: %(default)g)',
    )  # fmt: skip


def add_scales_argument(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        '--scales', type=scales, metavar='A,B,...',
        help='run the network at each of these multiples of the image size and keep the best '
        'keypoints of all: 1 is fastest, 1,0.5 is robust to changes of distance, 2,1 is most '
        'precise (default: 1,0.5; 1 for an exported model, which has one size)',
    )  # fmt: skip


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('pairs of images')
    group.add_argument(
        '--pairs', type=Path, metavar='FILE',
        help='match the pairs in this file, two names per line (default: all pairs)',
    )  # fmt: skip
    group.add_argument(
        '--window', type=positive, metavar='N',
        help='match each image with the next N images, for example the frames of a video',
    )  # fmt: skip
    group.add_argument(
        '--calibration', type=Path, metavar='FILE',
        help="camera calibration for --format colmap: a YAML file from ROS's camera_calibration "
        '(default: COLMAP reads the focal length from EXIF or guesses it)',
    )  # fmt: skip


def load_detector(args: argparse.Namespace) -> KeypointDetector:
    """Load the detector that the arguments of `add_model_arguments` describe."""
    detector = KeypointDetector.load(
        args.model, runtime=args.runtime, precision=args.precision, threads=args.threads
    )
    if detector.runtime.problem:
        print(f'a better runtime does not work: {detector.runtime.problem}', file=sys.stderr)
    return detector


def detection_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `add_detection_arguments` as keyword arguments of `detect`."""
    return {
        'working_size': args.size,
        'scales': args.scales,
        'max_keypoints': args.max_keypoints,
        'score_threshold': args.score_threshold,
        'nms_radius': args.nms_radius,
    }
