"""kp2d evaluate: measure and compare models and classical methods."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kp2d_core.commands.arguments import (
    RawHelpFormatter,
    add_scales_argument,
    positive,
    real_number,
    size,
    threads,
)
from kp2d_core.detector import MOST_RADIUS, NMS_RADIUS
from kp2d_core.evaluation.camera_paths import CameraPath, load_camera_path
from kp2d_core.evaluation.hpatches import TRUTHS, load_sequences, select_split
from kp2d_core.evaluation.methods import BASELINES, NamedExtractor, open_methods
from kp2d_core.evaluation.motion import GAPS, choose_pairs, motion_test
from kp2d_core.evaluation.plots import Gallery
from kp2d_core.evaluation.protocol import Evaluation, Extract, evaluate, once
from kp2d_core.evaluation.reliability import FOUND
from kp2d_core.evaluation.robustness import robustness, shift_test
from kp2d_core.evaluation.study import Study, write_json
from kp2d_core.evaluation.tables import format_markdown, format_study
from kp2d_core.features import in_order_of_score
from kp2d_core.images import Image, find_images, read_image

DESCRIPTION = """\
Compare models and classical methods on pairs of images. The table shows repeatability,
localization error, homography accuracy and matching score as the KP2D paper defines them, and the
number of correct matches and their error. By default each place counts once and the ground truth
is exact. --nms-radius 0 selects the paper's protocol, which counts several points at one place.

DATA is a folder in HPatches layout: one folder for each sequence, with the images 1.png ... 6.png
(any format) and the homographies H_1_2 ... H_1_6."""
EXAMPLES = """\
examples:
  kp2d evaluate --data hpatches                         the model small, 320x240, 300 points
  kp2d evaluate --data hpatches --nms-radius 0          the same with the paper's protocol
  kp2d evaluate --data hpatches --size 640x480 --top-k 1000 --seeds 10
  kp2d evaluate --data hpatches --model small fast mine.safetensors --baselines sift,orb --html out
  kp2d evaluate --data hpatches --model small --precision fp32 int8 --json out.json
  kp2d evaluate --data hpatches --model small --scales 2,1
  kp2d evaluate --data hpatches --refine                with and without refined matches
  kp2d evaluate --data hpatches --model none --baselines all --splits bark boat graffiti
  kp2d evaluate --shift photos --robustness photos --baselines sift
  kp2d evaluate --motion kitti/00 tum/fr1_xyz --top-k 1000 --baselines sift orb

To evaluate any other ONNX extractor, describe it in a YAML file and give that as --model; see
docs/evaluation.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = RawHelpFormatter
    methods = parser.add_argument_group('what to evaluate')
    methods.add_argument(
        '--model', nargs='+', action='extend', metavar='MODEL',
        help='shipped models, .safetensors files, exported models, or YAML files that describe '
        "another ONNX extractor; 'none' to evaluate only the baselines (default: small)",
    )  # fmt: skip
    methods.add_argument(
        '--baselines', nargs='+', action='extend', default=[], metavar='NAME',
        help=f"classical methods: {', '.join(BASELINES)}, or 'all' (default: none)",
    )  # fmt: skip
    methods.add_argument(
        '--runtime', default='auto',
        help='inference runtime of the models (default: the best of this machine)',
    )  # fmt: skip
    methods.add_argument(
        '--precision', nargs='+', default=['auto'],
        help='precision of the models: one or several of fp32, fp16, int8 (default: fp32; an '
        'exported model has its own)',
    )  # fmt: skip
    methods.add_argument('--threads', type=threads, help='CPU threads of each model')

    add_scales_argument(methods)
    methods.add_argument(
        '--refine', action='store_true',
        help='add a row for each method with refined matches: align the patches around each '
        'match and drop matches that do not align',
    )  # fmt: skip

    data = parser.add_argument_group('data and protocol')
    data.add_argument('--data', type=Path, help='a folder in HPatches layout')
    data.add_argument(
        '--sequences', nargs='+', default=[], metavar='NAME',
        help='evaluate only these sequences (default: all)',
    )  # fmt: skip
    data.add_argument(
        '--splits', nargs='+', default=['all', 'illumination', 'viewpoint'], metavar='SPLIT',
        help="print one table per split: 'all', 'illumination', 'viewpoint', the name of a "
        "sequence, or 'each' for every sequence (default: all illumination viewpoint)",
    )  # fmt: skip
    data.add_argument(
        '--size', type=size, default=(320, 240), metavar='WxH',
        help='resize images to this size, except for --motion (default: 320x240)',
    )  # fmt: skip
    data.add_argument(
        '--top-k', type=positive, default=300, metavar='K',
        help='use at most K points per image, those with the highest scores '
        '(default: %(default)s)',
    )  # fmt: skip
    data.add_argument(
        '--nms-radius', type=real_number(least=0, most=MOST_RADIUS), default=NMS_RADIUS,
        metavar='PX',
        help='count only the best point within this radius in pixels, for every method; 0: count '
        'all points, as the paper does (default: %(default)g)',
    )  # fmt: skip
    data.add_argument(
        '--truth', choices=TRUTHS,
        help='how to adapt homographies to resized images: exact, or scaled without the '
        'half-pixel shift, as the paper does (default: exact; paper with --nms-radius 0)',
    )  # fmt: skip
    data.add_argument(
        '--found-within', type=real_number(above=0), default=FOUND, metavar='PX',
        help='for the reliability of scores, a point counts as found again within PX pixels '
        '(default: %(default)g)',
    )  # fmt: skip
    data.add_argument(
        '--seeds', type=positive, default=1, metavar='N',
        help='run RANSAC N times per pair and report mean and standard deviation '
        '(default: %(default)s)',
    )  # fmt: skip

    tests = parser.add_argument_group('further tests')
    tests.add_argument(
        '--shift', nargs='*', type=Path, metavar='PHOTO',
        help="shift photographs by 0 to 8 px to test whether keypoints follow the image or the "
        "network's grid; files or folders (default: image 1 of each sequence)",
    )  # fmt: skip
    tests.add_argument(
        '--robustness', nargs='*', type=Path, metavar='PHOTO',
        help='measure the matching score under rotation, scale, brightness, blur and noise; files '
        'or folders (default: image 1 of each sequence)',
    )  # fmt: skip
    tests.add_argument(
        '--max-photos', type=positive, default=20, metavar='N',
        help='use at most N photographs for these two tests, evenly spread over those given '
        '(default: %(default)s)',
    )  # fmt: skip
    tests.add_argument(
        '--motion', nargs='+', type=Path, metavar='DIR', default=[],
        help='measure the error of the estimated rotation and direction of a moving camera, on '
        'recordings in the layout of KITTI (image_0/, calib.txt, poses.txt) or TUM (rgb.txt, '
        'groundtruth.txt, and intrinsics.txt with fx fy cx cy k1 k2 p1 p2 k3)',
    )  # fmt: skip
    tests.add_argument(
        '--gaps', nargs='+', type=positive, default=GAPS, metavar='N',
        help='pair frames that are this many frames apart (default: 1 2 5 10 20)',
    )  # fmt: skip

    output = parser.add_argument_group('output')
    output.add_argument(
        '--paper', choices=('same', 'all', 'none'), default='same',
        help="print the paper's figures below ours: for the same methods, for all, or none "
        '(default: %(default)s)',
    )  # fmt: skip
    output.add_argument(
        '--markdown', action='store_true', help='print only the tables of metrics, as Markdown'
    )
    output.add_argument('--json', type=Path, metavar='FILE', help='write all figures to a file')
    output.add_argument(
        '--html', type=Path, metavar='DIR',
        help='write a report with plots and drawn matches to DIR/index.html',
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    _check(args)
    study = Study(
        data=args.data.name or str(args.data) if args.data else '',
        size=args.size,
        top_k=args.top_k,
        seeds=args.seeds,
        nms_radius=args.nms_radius,
        truth=args.truth or ('exact' if args.nms_radius else 'paper'),
        found_within=args.found_within,
        paper=args.paper,
    )
    if args.data:
        study.sequences = load_sequences(args.data, args.sequences, study.skipped.append)
        study.splits = _splits(args.splits, study)
    for sentence in study.skipped:
        print(sentence, file=sys.stderr)
    methods = open_methods(
        _models(args.model),
        _baselines(args.baselines),
        runtime=args.runtime,
        precisions=args.precision,
        threads=args.threads,
        scales=args.scales,
        size=args.size,
        top_k=args.top_k,
    )
    if not methods:
        raise ValueError('there is nothing to evaluate: give a --model, or --baselines')
    shift_photos = _photographs(args.shift, args.max_photos, study)
    robustness_photos = _photographs(args.robustness, args.max_photos, study)
    paths = _camera_paths(args.motion, args.gaps)

    gallery = _gallery(study) if args.html else Gallery({}, study.top_k)
    for method in methods:
        study.methods[method.name] = method.description
        refined = f'{method.name} refined'
        if args.refine and (study.sequences or paths):
            study.methods[refined] = f'{method.description}, matches refined'
        extract = _each_place_once(method.extract, args.nms_radius)
        if study.sequences:
            evaluation = _evaluate(method, study, gallery, args.refine)
            study.evaluations[method.name] = evaluation
            if evaluation.refined is not None:
                study.evaluations[refined] = evaluation.refined
        if shift_photos:
            study.shift[method.name] = shift_test(
                extract, shift_photos, size=args.size, top_k=args.top_k, progress=True
            )
        if robustness_photos:
            study.robustness[method.name] = robustness(
                extract, robustness_photos, size=args.size, top_k=args.top_k, progress=True
            )
        for name in [method.name, refined][: 1 + args.refine] if paths else []:
            study.motion[name] = {
                path.name: motion_test(
                    extract,
                    path,
                    args.gaps,
                    top_k=args.top_k,
                    seeds=args.seeds,
                    refine=name == refined,
                    progress=True,
                )
                for path in paths
            }

    print(format_markdown(study) if args.markdown else format_study(study))
    if args.json:
        write_json(args.json, study)
        print(f'\nfigures in {args.json}')
    if args.html:
        from kp2d_core.evaluation.report import write_report

        print(f'\nreport in {write_report(args.html, study, gallery)}')
    return 0


def _evaluate(method: NamedExtractor, study: Study, gallery: Gallery, refine: bool) -> Evaluation:
    evaluation = evaluate(
        method.extract,
        study.sequences,
        size=study.size,
        top_k=study.top_k,
        seeds=study.seeds,
        nms_radius=study.nms_radius,
        truth=study.truth,
        found_within=study.found_within,
        refine=refine,
        progress=True,
        name=method.name,
        watch=lambda pair, result: gallery.add(method.name, pair, result),
    )
    known = evaluation.reliability()
    if method.scores_are_shares and known is not None:
        study.reliability[method.name] = known
    return evaluation


def _each_place_once(extract: Extract, nms_radius: float) -> Extract:
    return lambda image: once(in_order_of_score(extract(image)), nms_radius)


def _check(args: argparse.Namespace) -> None:
    """Check the arguments before anything takes long."""
    if not (args.data or args.shift or args.robustness or args.motion):
        raise ValueError('give --data, a folder in HPatches layout, photographs to --shift or '
                         '--robustness, or camera paths to --motion')  # fmt: skip
    if args.markdown and not args.data:
        raise ValueError('--markdown prints the tables of --data, and there is none')
    if args.json and args.json.is_dir():
        raise ValueError(f'--json must be a file, {args.json} is a folder')
    if args.html and args.html.exists() and not args.html.is_dir():
        raise ValueError(f'--html must be a folder, {args.html} is a file')
    if args.html:
        from kp2d_core.evaluation.plots import require_matplotlib

        require_matplotlib()


def _models(given: list[str] | None) -> list[str]:
    if given is None:
        return ['small']
    return [] if given == ['none'] else given


def _baselines(given: list[str]) -> list[str]:
    """Parse 'sift,orb', 'sift orb' or 'all'."""
    names = [name.lower() for text in given for name in text.split(',') if name]
    if names == ['none']:
        return []
    return list(BASELINES) if names == ['all'] else names


def _splits(given: list[str], study: Study) -> list[str]:
    names: list[str] = []
    for split in (part for text in given for part in text.split(',') if part):
        if split == 'each':
            names += [sequence.name for sequence in study.sequences]
        elif split not in ('all', 'illumination', 'viewpoint') and not select_split(
            study.sequences, split
        ):
            there = ', '.join(sequence.name for sequence in study.sequences)
            raise ValueError(
                f"there is no split '{split}': choose from all, illumination, viewpoint, each, "
                f'{there}'
            )
        else:
            names.append(split)
    return list(dict.fromkeys(names))


def _photographs(given: list[Path] | None, limit: int, study: Study) -> list[Image]:
    """Choose photographs for a test: those given, or image 1 of each sequence; None: no test."""
    if given is None:
        return []
    paths = find_images(given) if given else [sequence.images[1] for sequence in study.sequences]
    if not paths:
        raise ValueError(f'there is no image in {", ".join(map(str, given))}')
    step = max(len(paths) / limit, 1)
    return [read_image(paths[int(i * step)]) for i in range(min(limit, len(paths)))]


def _camera_paths(folders: list[Path], gaps: list[int]) -> list[CameraPath]:
    paths = [load_camera_path(folder) for folder in folders]
    for path in paths:
        choose_pairs(path, gaps)  # raises an error at once if there is no pair
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f'two camera paths have the same name: {", ".join(names)}')
    return paths


def _gallery(study: Study) -> Gallery:
    """Draw the first and the last pair of each sequence, in HPatches the easiest and hardest."""
    targets = {
        sequence.name: {min(sequence.homographies), max(sequence.homographies)}
        for sequence in study.sequences
    }
    return Gallery(targets, study.top_k)
