"""Match two views of photographs that scikit-image ships, and save the overlays.

With --hard, the views are very difficult: correct matches are green, wrong ones red.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.commands.arguments import add_scales_argument
from kp2d_core.detector import KeypointDetector
from kp2d_core.evaluation.metrics import correct_matches
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.images import Image
from kp2d_core.matching import match
from kp2d_core.visualize import draw_keypoints, draw_matches, write_image

PHOTOGRAPHS = ('astronaut', 'coffee', 'chelsea', 'rocket')
# Photograph -> rotation in degrees, zoom, stretch (as in an oblique view of a plane).
HARD = {'gravel': (70, 2.5, 1.0), 'coffee': (40, 3.0, 1.0), 'astronaut': (10, 1.0, 3.5)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '-o', '--output', type=Path, default=Path('out'), help='output folder (default: out)'
    )
    parser.add_argument('--model', default='auto', help='model (default: auto)')
    parser.add_argument('--hard', action='store_true', help='use views that are hard to match')
    add_scales_argument(parser)
    args = parser.parse_args()

    detector = KeypointDetector.load(args.model)
    print(f'{detector.runtime.model} on {detector.runtime.description}')
    detect = partial(detector.detect, scales=args.scales, max_keypoints=500)
    (show_hard if args.hard else show)(detect, args.output)
    print(f'overlays in {args.output.resolve()}')
    return 0


def show(detect: Extract, output: Path) -> None:
    for name in PHOTOGRAPHS:
        image = photograph(name)
        view = second_view(image)
        first, second = (detect(i) for i in (image, view))
        matches = match(first, second, verification='homography')
        write_image(output / f'{name}-keypoints.png', draw_keypoints(image, first))
        write_image(
            output / f'{name}-matches.png', draw_matches(image, view, first, second, matches)
        )
        print(
            f'{name:10} {len(first)} keypoints, {len(matches)} matches, '
            f'{int(matches.inliers.sum())} inliers'
        )


def show_hard(detect: Extract, output: Path) -> None:
    for name, how in HARD.items():
        image = photograph(name)
        view, there = hard_view(image, *how)
        first, second = (detect(i) for i in (image, view))
        found = match(first, second)
        before, now = found.indices.T
        right = correct_matches(first.keypoints[before], second.keypoints[now], there)
        matches = replace(found, inliers=right)
        picture = draw_matches(image, view, first, second, matches, judge=True)
        write_image(output / f'{name}-hard.png', picture)
        print(f'{name:10} {len(found)} matches, {int(right.sum())} right')


def photograph(name: str) -> Image:
    try:
        from skimage import data
    except ImportError:
        raise SystemExit('the demo needs scikit-image: pip install scikit-image') from None

    image = getattr(data, name)()
    return np.asarray(image if image.ndim == 3 else np.stack([image] * 3, axis=2), np.uint8)


def second_view(image: Image) -> Image:
    """Render another view of the photograph: rotated, enlarged, in perspective, darker."""
    height, width = image.shape[:2]
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    moved = corners + np.array([[-60, -20], [40, -60], [70, 50], [-30, 20]], np.float32)
    homography = cv2.getPerspectiveTransform(corners, moved)
    view = cv2.warpPerspective(image, homography, (width, height), borderMode=cv2.BORDER_REFLECT)
    return np.asarray(cv2.convertScaleAbs(view, alpha=0.8, beta=10), np.uint8)


def hard_view(
    image: Image, degrees: float, enlarged: float, narrower: float
) -> tuple[Image, NDArray[np.float64]]:
    """Rotate, enlarge and stretch the photograph about its centre; return view and homography."""
    height, width = image.shape[:2]
    turn = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, enlarged)
    squeeze = np.array([[1 / narrower, 0, (width - 1) / 2 * (1 - 1 / narrower)], [0, 1, 0]])
    there = np.vstack([squeeze, [0, 0, 1]]) @ np.vstack([turn, [0, 0, 1]])
    return np.asarray(cv2.warpPerspective(image, there, (width, height)), np.uint8), there


if __name__ == '__main__':
    raise SystemExit(main())
