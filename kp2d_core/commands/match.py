"""kp2d match: the matches of two images, drawn."""

from __future__ import annotations

import argparse
from pathlib import Path

from kp2d_core.commands.arguments import (
    add_detection_arguments,
    add_model_arguments,
    detection_options,
    load_detector,
    real_number,
)
from kp2d_core.images import read_image
from kp2d_core.matching import match
from kp2d_core.visualize import draw_matches, write_image

GEOMETRIES = {
    'none': '',
    'homography': ' of one homography (for scenes with depth: --verification fundamental)',
    'fundamental': ' of one epipolar geometry',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('first', type=Path, help='an image')
    parser.add_argument('second', type=Path, help='another image')
    parser.add_argument(
        '-o', '--output', type=Path, default=Path('matches.png'), help='where to draw the matches'
    )
    add_model_arguments(parser)
    add_detection_arguments(parser)
    group = parser.add_argument_group('matching')
    group.add_argument(
        '--max-ratio', type=real_number(above=0), help='ratio test, such as 0.9 (default: off)'
    )
    group.add_argument(
        '--max-distance', type=real_number(above=0), help='of descriptors, 0 to 2 (default: off)'
    )
    group.add_argument(
        '--verification', choices=('none', 'homography', 'fundamental'), default='homography',
        help='geometry that tells inliers from outliers: homography for a plane or a camera that '
        'only turns, fundamental for scenes with depth',
    )  # fmt: skip
    group.add_argument(
        '--threshold', type=real_number(above=0), default=3.0, help='of the verification, in px'
    )


def run(args: argparse.Namespace) -> int:
    images = read_image(args.first), read_image(args.second)
    detector = load_detector(args)
    first, second = (detector.detect(image, **detection_options(args)) for image in images)
    matches = match(
        first,
        second,
        max_ratio=args.max_ratio,
        max_distance=args.max_distance,
        verification=args.verification,
        threshold=args.threshold,
    )
    write_image(args.output, draw_matches(*images, first, second, matches))
    print(
        f'{len(first)} and {len(second)} keypoints, {len(matches)} matches, '
        f'{int(matches.inliers.sum())} inliers{GEOMETRIES[args.verification]}, '
        f'drawn in {args.output}'
    )
    return 0
