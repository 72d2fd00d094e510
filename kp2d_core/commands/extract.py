"""kp2d extract: keypoints of images, one .npz each."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kp2d_core.commands.arguments import (
    add_detection_arguments,
    add_model_arguments,
    detection_options,
    load_detector,
)
from kp2d_core.errors import FileError, ModelError
from kp2d_core.features import Features
from kp2d_core.files import atomic_write
from kp2d_core.images import find_images, read_image
from kp2d_core.visualize import draw_keypoints, write_image


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('images', nargs='+', type=Path, help='image files, or folders of them')
    parser.add_argument(
        '-o', '--output', type=Path, required=True, metavar='DIR',
        help='folder for one .npz an image: keypoints, scores, descriptors, image_size',
    )  # fmt: skip
    parser.add_argument(
        '--overlay', action='store_true', help='also draw the keypoints, as NAME.keypoints.png'
    )
    add_model_arguments(parser)
    add_detection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    images = find_images(args.images)
    if not images:
        raise ValueError(f'there is no image in {", ".join(map(str, args.images))}')
    outputs = output_paths(images, args.output)
    if args.overlay:
        keep_inputs(images, outputs)
    detector = load_detector(args)
    failed = 0
    for path, output in zip(tqdm(images, unit='image', disable=None), outputs, strict=True):
        try:
            image = read_image(path)
            features = detector.detect(image, **detection_options(args))
        except ModelError:
            raise
        except (FileError, ValueError) as error:  # one bad file must not stop a thousand good ones
            print(f'kp2d extract: skipped: {path}: {error}', file=sys.stderr)
            failed += 1
            continue
        save_features(output, features)
        if args.overlay:
            write_image(overlay_path(output), draw_keypoints(image, features))
    print(f'{len(images) - failed} of {len(images)} images written to {args.output}')
    return 1 if failed else 0


def save_features(path: Path, features: Features) -> None:
    with atomic_write(path) as temporary:
        np.savez(
            temporary,
            keypoints=features.keypoints,
            scores=features.scores,
            descriptors=features.descriptors,
            image_size=np.array(features.image_size),
        )


def output_paths(images: list[Path], folder: Path) -> list[Path]:
    """One file name an image; its folders are part of it where the name alone is not unique."""
    parts = [image.absolute().parts[1:] for image in images]
    names = [image.stem for image in images]
    for depth in range(2, max(map(len, parts), default=0) + 1):
        times = Counter(names)
        if len(times) == len(names):
            break
        names = [
            name if times[name] == 1 else '_'.join(part[-depth:])
            for name, part in zip(names, parts, strict=True)
        ]
    if len(set(names)) < len(names):
        raise ValueError('two of the images would get the same output name')
    return [folder / f'{name}.npz' for name in names]


def overlay_path(output: Path) -> Path:
    return output.with_suffix('.keypoints.png')


def keep_inputs(images: list[Path], outputs: list[Path]) -> None:
    """ValueError if an overlay would replace one of the images."""
    given = {image.resolve() for image in images}
    for output in outputs:
        if overlay_path(output).resolve() in given:
            raise ValueError(
                f'an overlay would replace the image {overlay_path(output)}: '
                'give another folder to -o'
            )
