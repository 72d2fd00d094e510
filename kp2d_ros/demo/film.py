"""Film tracks, like the picture of the README: python -m kp2d_ros.demo.film -o tracks.webp

This needs Pillow, but no ROS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
from tqdm import tqdm

from kp2d_core.camera import camera_from_info
from kp2d_core.cli import explain
from kp2d_core.commands.arguments import (
    HelpFormatter,
    add_model_arguments,
    load_detector,
    positive,
    real_number,
    size,
    whole_number,
)
from kp2d_core.errors import FileError
from kp2d_core.files import atomic_write
from kp2d_core.images import Image
from kp2d_ros.camera.sources import Damage, open_source
from kp2d_ros.overlay import LASTED, Overlay
from kp2d_ros.pipeline import Frame, Pipeline
from kp2d_ros.settings import Settings

SUFFIXES = ('.webp', '.gif')


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog='python -m kp2d_ros.demo.film',
        description='Draw tracks on a source and save them as a moving picture.',
        formatter_class=HelpFormatter,
    )
    result.add_argument(
        '-o', '--output', type=Path, required=True, help='file to write: .webp or .gif'
    )
    result.add_argument(
        '--source', default='scene',
        help="images to use: a folder, image, video, bag, or 'scene': a camera moves in a room",
    )  # fmt: skip
    result.add_argument('--size', type=size, metavar='WxH', help='image size of a scene')
    result.add_argument('--skip', type=whole_number(), default=0, help='images to skip at first')
    result.add_argument('--frames', type=positive, default=60, help='number of frames')
    result.add_argument('--every', type=positive, default=1, help='use every Nth image')
    result.add_argument(
        '--rate', type=real_number(above=0, most=50), default=12.5, help='frames per second'
    )
    result.add_argument('--width', type=positive, default=480, help='width in pixels')
    result.add_argument('--quality', type=whole_number(1, 100), default=60, help='of .webp files')
    result.add_argument('--max-keypoints', type=positive, default=500, help='at most this many')
    result.add_argument('--tail', type=whole_number(0, 100), default=12, help='frames of a tail')
    add_model_arguments(result)
    return result


def drawn(args: argparse.Namespace) -> Iterator[Image]:
    """Yield the overlays, without the first images, which have no tracks yet."""
    pipeline, overlay = Pipeline(load_detector(args)), Overlay()
    settings = Settings(max_keypoints=args.max_keypoints)
    source = open_source(args.source, size=args.size)
    pictures = (each for each in source.pictures() if not isinstance(each, Damage))
    step = round(1e9 / args.rate)
    chosen = islice(pictures, args.skip, None, args.every)
    for number, picture in enumerate(islice(chosen, args.frames + LASTED)):
        camera = camera_from_info(picture.info) if picture.info is not None else None
        frame = Frame(picture.image, number * step, 'camera', camera)
        result = pipeline.process(frame, settings)
        tracked = int((result.tracks.ages >= LASTED).sum()) if result.tracks is not None else 0
        canvas = overlay.draw(result, f'{tracked} tracks', args.tail)
        if number >= LASTED:
            yield canvas


def main(arguments: Sequence[str] | None = None) -> int:
    from PIL import Image as Pillow

    args = parser().parse_args(arguments)
    if args.output.suffix not in SUFFIXES:
        raise ValueError(f'{args.output} must end in {" or ".join(SUFFIXES)}')
    frames = []
    for canvas in tqdm(drawn(args), total=args.frames, unit='frame', disable=None):
        height = round(canvas.shape[0] * args.width / canvas.shape[1])
        small = cv2.resize(canvas, (args.width, height), interpolation=cv2.INTER_AREA)
        frames.append(Pillow.fromarray(np.asarray(small, np.uint8)))
    if not frames:
        raise FileError(f'{args.source} has too few images: {LASTED + 1} are needed')
    with atomic_write(args.output) as path:
        frames[0].save(
            path, save_all=True, append_images=frames[1:], duration=round(1000 / args.rate),
            loop=0, quality=args.quality, method=4,
        )  # fmt: skip
    print(f'{len(frames)} frames, {args.output.stat().st_size / 1e6:.2f} MB: {args.output}')
    return 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except Exception as error:
        if not explain(error):
            raise
        print(explain(error), file=sys.stderr)
        sys.exit(2)
