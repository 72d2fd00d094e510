"""kp2d match: match two images and draw the matches, or match many and save them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kp2d_core.commands.arguments import (
    add_detection_arguments,
    add_model_arguments,
    add_pair_arguments,
    detection_options,
    load_detector,
    real_number,
)
from kp2d_core.commands.extract import (
    check_pair_arguments,
    extract_named,
    images_of,
    write_colmap,
)
from kp2d_core.exchange import (
    Named,
    Pair,
    choose_pairs,
    match_all,
    save_hloc_features,
    save_hloc_matches,
    save_matches_npz,
)
from kp2d_core.files import atomic_write
from kp2d_core.images import read_image
from kp2d_core.matching import match
from kp2d_core.refinement import match_refined
from kp2d_core.visualize import MOST_LINES, draw_matches, put_caption, write_image

GEOMETRIES = {
    'none': '',
    'homography': ' of one homography (for scenes with depth: --verification fundamental)',
    'fundamental': ' of one epipolar geometry',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        'Match two images and draw the matches. With --format, match many images and write the '
        'matches to files.'
    )
    parser.add_argument(
        'images', nargs='+', type=Path,
        help='two images; with --format any number of images and folders',
    )  # fmt: skip
    parser.add_argument(
        '-o', '--output', type=Path, metavar='PATH',
        help='picture to write (default: matches.png); with --format npz or hloc the output '
        'folder, with colmap the database',
    )  # fmt: skip
    parser.add_argument(
        '--format', choices=('npz', 'hloc', 'colmap'),
        help='npz: one file per pair; hloc: features.h5, matches.h5 and pairs.txt; colmap: a '
        'database with keypoints, matches and two-view geometries',
    )  # fmt: skip
    add_model_arguments(parser)
    add_detection_arguments(parser)
    group = parser.add_argument_group('matching')
    group.add_argument(
        '--max-ratio', type=real_number(above=0), metavar='R',
        help='ratio test: keep a match if its distance is below R times that of the second '
        'nearest, such as 0.9 (default: off)',
    )  # fmt: skip
    group.add_argument(
        '--max-distance', type=real_number(above=0), metavar='D',
        help='keep matches with a descriptor distance of at most D, 0 to 2 (default: off)',
    )  # fmt: skip
    group.add_argument(
        '--verification', choices=tuple(GEOMETRIES),
        help='geometric model that separates inliers from outliers: homography for a plane or a '
        'camera that only rotates, fundamental for scenes with depth (default: homography for '
        'two images, fundamental for npz, none for hloc and colmap, which do their own '
        'verification)',
    )  # fmt: skip
    group.add_argument(
        '--threshold',
        type=real_number(above=0),
        default=3.0,
        metavar='PX',
        help='largest error of an inlier, in pixels',
    )
    group.add_argument(
        '--refine', action='store_true',
        help='refine the matches of two images to sub-pixel accuracy by aligning the patches '
        'around them; a match that does not align is not an inlier',
    )  # fmt: skip
    add_pair_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.format is None:
        return match_two(args)
    if args.output is None:
        raise ValueError(f'--format {args.format} needs -o: where to write')
    if args.refine:
        raise ValueError('--refine works only with two images: these formats store one position '
                         'per keypoint, not one per match')  # fmt: skip
    check_pair_arguments(args)
    images = images_of(args)
    if len(images) < 2:
        raise ValueError('there is only one image: matching needs two or more')
    named = extract_named(args, images, load_detector(args))
    if args.format == 'colmap':
        write_colmap(args, named, **options_of(args, 'none'))
    elif args.format == 'hloc':
        write_hloc(args, named)
    else:
        write_npz(args, named)
    return 0 if len(named.names) == len(images) else 1


def match_two(args: argparse.Namespace) -> int:
    if len(args.images) != 2 or any(path.is_dir() for path in args.images):
        raise ValueError('give two images, or --format npz, hloc or colmap for many')
    if args.pairs or args.window or args.calibration:
        raise ValueError('--pairs, --window and --calibration go with --format')
    images = read_image(args.images[0]), read_image(args.images[1])
    detector = load_detector(args)
    first, second = (detector.detect(image, **detection_options(args)) for image in images)
    options = options_of(args, 'homography')
    aligned = ''
    if args.refine:
        matches, refined = match_refined(*images, first, second, **options)
        second = refined.moved(second, matches)
        aligned = f'{int(refined.aligned.sum())} aligned, '
    else:
        matches = match(first, second, **options)
    output = args.output or Path('matches.png')
    picture = draw_matches(*images, first, second, matches)
    inliers = int(matches.inliers.sum())
    drawn = min(inliers, MOST_LINES)
    put_caption(picture, f'{inliers} inliers of {len(matches)} matches, {drawn} drawn')
    write_image(output, picture)
    print(
        f'{len(first)} and {len(second)} keypoints, {len(matches)} matches, {aligned}'
        f'{inliers} inliers{GEOMETRIES[options["verification"]]}, '
        f'drawn in {output}'
    )
    return 0


def write_npz(args: argparse.Namespace, named: Named) -> None:
    pairs = choose_pairs(named.names, args.pairs, args.window)
    total = 0
    for (i, j), matches in progress(args, named, pairs, 'fundamental'):
        names = (named.names[index].replace('/', '_') for index in (i, j))
        path = args.output / f'{"--".join(names)}.npz'
        save_matches_npz(path, named.features[i], named.features[j], matches)
        total += int(matches.inliers.sum())
    print(f'{len(pairs)} pairs with {total} inliers written to {args.output}')


def write_hloc(args: argparse.Namespace, named: Named) -> None:
    pairs = choose_pairs(named.names, args.pairs, args.window)
    found = zip(named.names, named.features, strict=True)
    save_hloc_features(args.output / 'features.h5', found)
    save_hloc_matches(args.output / 'matches.h5', named, progress(args, named, pairs, 'none'))
    with atomic_write(args.output / 'pairs.txt') as temporary:
        lines = (f'{named.names[i]} {named.names[j]}\n' for i, j in pairs)
        temporary.write_text(''.join(lines))
    print(f'{len(named.names)} images and {len(pairs)} pairs written to {args.output}')


def progress(args: argparse.Namespace, named: Named, pairs: list[Pair], default: str) -> Any:
    matched = match_all(named, pairs, **options_of(args, default))
    return tqdm(matched, total=len(pairs), unit='pair', disable=None)


def options_of(args: argparse.Namespace, default: str) -> dict[str, Any]:
    return {
        'max_ratio': args.max_ratio,
        'max_distance': args.max_distance,
        'verification': args.verification or default,
        'threshold': args.threshold,
    }
