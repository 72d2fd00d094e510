"""kp2d map: reconstruct a COLMAP model from photographs or a recording."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

from kp2d_core.bags import is_bag
from kp2d_core.camera import Camera
from kp2d_core.commands.arguments import (
    RawHelpFormatter,
    add_detection_arguments,
    add_model_arguments,
    detection_options,
    load_detector,
    positive,
)
from kp2d_core.commands.extract import camera_of, extract_named
from kp2d_core.commands.odometry import words_of
from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.exchange import Named, match_all, save_colmap
from kp2d_core.features import Float
from kp2d_core.images import IMAGE_SUFFIXES, find_images
from kp2d_core.odometry.reconstruction import choose_map_pairs, keep_others, reconstruct
from kp2d_core.odometry.recordings import SCENES, Recording, open_recording
from kp2d_core.visualize import write_image

DESCRIPTION = """\
Reconstruct cameras and points from photographs or from a recording. Write a COLMAP model, which
COLMAP, hloc and many other programs read.

IMAGES are image files or folders of photographs in any order, or one recording: a folder in
the layout of KITTI or TUM, a bag with camera_info, a video with --calibration, or a rendered
scene. See `kp2d odometry --help`."""
EXAMPLES = """\
examples:
  kp2d map photos -o model                              focal lengths are estimated
  kp2d map photos -o model --calibration camera.yaml
  kp2d map drive.mcap --every 5 -o model
  kp2d map kitti/00 -o model

The folder then contains cameras.bin, images.bin, points3D.bin, points3D.ply and database.db."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = RawHelpFormatter
    parser.add_argument('images', nargs='+', metavar='IMAGES', help='photographs or a recording')
    parser.add_argument(
        '-o', '--output', type=Path, required=True, metavar='DIR', help='folder to write'
    )
    parser.add_argument(
        '--calibration', type=Path, metavar='FILE',
        help="calibration of the camera that took all images: a YAML file from ROS's "
        'camera_calibration (default: estimate the focal length)',
    )  # fmt: skip
    parser.add_argument('--topic', metavar='TOPIC', help='image topic of a bag')
    parser.add_argument(
        '--every', type=positive, default=1, metavar='N',
        help='take only every N-th frame of a recording (default: %(default)s)',
    )  # fmt: skip
    parser.add_argument(
        '--sequence', action='store_true',
        help='match each image with those that follow it by name, as in a video, and with similar '
        'ones, instead of all',
    )  # fmt: skip
    add_model_arguments(parser)
    add_detection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import pycolmap  # noqa: F401  before an hour of work, not after it

    keep_others(args.output, ('images', 'database.db'))
    recording, detector = _recording(args), load_detector(args)
    if recording is None:
        args.images = [Path(image) for image in args.images]
        files = find_images(args.images)
        if len(files) < 2:
            raise ValueError('a model needs two images or more')
        camera, sequence = camera_of(args), args.sequence
        named = extract_named(args, files, detector)
    else:
        camera, sequence = recording.rig.cameras[0], True
        named = _frames(args, recording, detector)
    model = _map(args, named, camera, sequence, words_of(detector))
    return 0 if model == len(named.names) else 1


def _recording(args: argparse.Namespace) -> Recording | None:
    """Open the recording if one is given; None for photographs."""
    text = args.images[0]
    path = Path(text).expanduser()
    listed = (path / 'calib.txt').is_file() or (path / 'rgb.txt').is_file()
    film = path.is_file() and not is_bag(path) and path.suffix.lower() not in IMAGE_SUFFIXES
    if len(args.images) == 1 and (text in SCENES or is_bag(path) or listed or film):
        topics = [args.topic] if args.topic else []
        return open_recording(text, calibration=args.calibration, topics=topics).every(args.every)
    return None


def _frames(args: argparse.Namespace, recording: Recording, detector: KeypointDetector) -> Named:
    """Extract features of a recording; save its frames next to the model for COLMAP."""
    options = detection_options(args)
    folder = args.output / 'images'
    names, features = [], []
    shots = tqdm(recording.shots(), total=recording.count, unit='frame', disable=None)
    for number, (_, images) in enumerate(shots):
        name = f'{number:06}.png'
        write_image(folder / name, images[0])
        names.append(name)
        features.append(detector.detect(images[0], **options))
    if len(names) < 2:
        raise FileError(f'{recording.name} has {len(names)} frames: a model needs two or more')
    return Named(folder, names, features)


def _map(
    args: argparse.Namespace,
    named: Named,
    camera: Camera | None,
    sequence: bool,
    words: Float | None,
) -> int:
    pairs = choose_map_pairs(named.features, sequence, words)
    matched = tqdm(match_all(named, pairs), total=len(pairs), unit='pair', disable=None)
    args.output.mkdir(parents=True, exist_ok=True)
    database = args.output / 'database.db'
    verified = save_colmap(database, named, matched, camera)
    print(f'{len(named.names)} images, {len(pairs)} pairs, {verified} of them verified')
    with tqdm(total=len(named.names), unit='image', desc='mapping', disable=None) as bar:

        def tick() -> None:
            bar.update()

        model = reconstruct(
            database,
            named.root,
            args.output,
            calibrated=camera is not None,
            on_image=tick,
        )
    print(
        f'{model.images} of {len(named.names)} images and {model.points} points, each seen by '
        f'{model.track:.1f} images, {np.round(model.error, 2)} px, in {model.folder}'
    )
    if model.models > 1:
        print(f'{model.models - 1} further models in folders 1, 2, ...: no image connects them')
    return model.images
