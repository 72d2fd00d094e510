"""kp2d extract: find keypoints in images and save them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from kp2d_core.camera import Camera, camera_from_info, read_calibration
from kp2d_core.commands.arguments import (
    add_detection_arguments,
    add_model_arguments,
    add_pair_arguments,
    detection_options,
    load_detector,
)
from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError, ModelError
from kp2d_core.exchange import (
    Named,
    choose_pairs,
    match_all,
    names_below,
    save_colmap,
    save_hloc_features,
    save_npz,
)
from kp2d_core.features import Features
from kp2d_core.images import Image, find_images, read_image
from kp2d_core.visualize import draw_keypoints, write_image


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('images', nargs='+', type=Path, help='image files or folders')
    parser.add_argument(
        '-o', '--output', type=Path, required=True, metavar='PATH',
        help='with npz the output folder, with hloc and colmap the output file',
    )  # fmt: skip
    parser.add_argument(
        '--format', choices=('npz', 'hloc', 'colmap'), default='npz',
        help='npz: one file per image with keypoints, scores, descriptors, scales, image_size; '
        'hloc: one HDF5 file for hloc; colmap: a database with keypoints, matches and two-view '
        'geometries, ready for `colmap mapper`',
    )  # fmt: skip
    parser.add_argument(
        '--overlay', action='store_true',
        help='also draw the keypoints to NAME.keypoints.png (npz only)',
    )  # fmt: skip
    add_model_arguments(parser)
    add_detection_arguments(parser)
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_pair_arguments(args, only='colmap')
    if args.overlay and args.format != 'npz':
        raise ValueError('--overlay goes with --format npz')
    images = images_of(args)
    if args.format == 'npz':
        return extract_npz(args, images)
    named = extract_named(args, images, load_detector(args))
    if args.format == 'hloc':
        save_hloc_features(args.output, zip(named.names, named.features, strict=True))
        print(f'{len(named.names)} of {len(images)} images written to {args.output}')
    else:
        write_colmap(args, named)
    return 0 if len(named.names) == len(images) else 1


def images_of(args: argparse.Namespace) -> list[Path]:
    images = find_images(args.images)
    if not images:
        raise ValueError(f'there is no image in {", ".join(map(str, args.images))}')
    return images


def extract_npz(args: argparse.Namespace, images: list[Path]) -> int:
    outputs = output_paths(images, args.output)
    if args.overlay:
        keep_inputs(images, outputs)
    targets = dict(zip(images, outputs, strict=True))
    written = 0
    for path, image, features in extracted(args, images, load_detector(args)):
        save_npz(targets[path], features)
        if args.overlay:
            write_image(overlay_path(targets[path]), draw_keypoints(image, features))
        written += 1
    print(f'{written} of {len(images)} images written to {args.output}')
    return 0 if written == len(images) else 1


def extract_named(
    args: argparse.Namespace, images: list[Path], detector: KeypointDetector
) -> Named:
    """Extract the features of all readable images, by name; raise FileError if there are none."""
    found = {path: features for path, _, features in extracted(args, images, detector)}
    if not found:
        raise FileError('none of the images could be used')
    root, names = names_below(list(found))
    return Named(root, names, list(found.values()))


def extracted(
    args: argparse.Namespace, images: list[Path], detector: KeypointDetector
) -> Iterator[tuple[Path, Image, Features]]:
    options = detection_options(args)
    for path in tqdm(images, unit='image', disable=None):
        try:
            image = read_image(path)
            features = detector.detect(image, **options)
        except ModelError:
            raise
        except (FileError, ValueError) as error:  # one bad file must not stop the others
            where = '' if isinstance(error, FileError) else f'{path}: '  # a FileError names it
            print(f'kp2d {args.command}: skipped: {where}{error}', file=sys.stderr)
            continue
        yield path, image, features


def write_colmap(args: argparse.Namespace, named: Named, **options: object) -> None:
    pairs = choose_pairs(named.names, args.pairs, args.window)
    matched = tqdm(match_all(named, pairs, **options), total=len(pairs), unit='pair', disable=None)
    verified = save_colmap(args.output, named, matched, camera_of(args))
    print(
        f'{len(named.names)} images and {len(pairs)} pairs, {verified} of them verified, written '
        f'to {args.output}'
    )


def camera_of(args: argparse.Namespace) -> Camera | None:
    if args.calibration is None:
        return None
    camera = camera_from_info(read_calibration(args.calibration))
    if camera is None:
        raise FileError(f'{args.calibration} says that the camera is not calibrated')
    return camera


def check_pair_arguments(args: argparse.Namespace, only: str | None = None) -> None:
    """Raise ValueError for arguments that the format does not use."""
    if args.calibration is not None and args.format != 'colmap':
        raise ValueError('--calibration goes with --format colmap')
    if args.pairs is not None and args.window is not None:
        raise ValueError('give --pairs or --window, not both')
    if only and args.format != only and (args.pairs or args.window):
        raise ValueError(f'--pairs and --window go with --format {only}')


def output_paths(images: list[Path], folder: Path) -> list[Path]:
    """Make one file name per image, including its folders if the name alone is not unique."""
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
    """Raise ValueError if an overlay would replace one of the images."""
    given = {image.resolve() for image in images}
    for output in outputs:
        if overlay_path(output).resolve() in given:
            raise ValueError(
                f'an overlay would replace the image {overlay_path(output)}: '
                'give another folder to -o'
            )
