"""A first look: match two views of photographs that scikit-image ships, and save the overlays."""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np

from kp2d_core.detector import KeypointDetector
from kp2d_core.images import Image
from kp2d_core.matching import match
from kp2d_core.visualize import draw_keypoints, draw_matches, write_image

PHOTOGRAPHS = ('astronaut', 'coffee', 'chelsea', 'rocket')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('-o', '--output', type=Path, default=Path('out'), help='default: out')
    parser.add_argument('--model', default='small', help='default: small')
    args = parser.parse_args()

    from skimage import data

    detector = KeypointDetector.load(args.model)
    print(f'{args.model} on {detector.runtime.description}')
    for name in PHOTOGRAPHS:
        image: Image = getattr(data, name)()
        view = second_view(image)
        first, second = (detector.detect(i, max_keypoints=500) for i in (image, view))
        matches = match(first, second, verification='homography')
        write_image(args.output / f'{name}-keypoints.png', draw_keypoints(image, first))
        write_image(
            args.output / f'{name}-matches.png', draw_matches(image, view, first, second, matches)
        )
        print(
            f'{name:10} {len(first)} keypoints, {len(matches)} matches, '
            f'{int(matches.inliers.sum())} inliers'
        )
    print(f'overlays in {args.output.resolve()}')
    return 0


def second_view(image: Image) -> Image:
    """The photograph seen from elsewhere: turned, closer, in perspective, darker."""
    height, width = image.shape[:2]
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    moved = corners + np.array([[-60, -20], [40, -60], [70, 50], [-30, 20]], np.float32)
    homography = cv2.getPerspectiveTransform(corners, moved)
    view = cv2.warpPerspective(image, homography, (width, height), borderMode=cv2.BORDER_REFLECT)
    return np.asarray(cv2.convertScaleAbs(view, alpha=0.8, beta=10), np.uint8)


if __name__ == '__main__':
    raise SystemExit(main())
