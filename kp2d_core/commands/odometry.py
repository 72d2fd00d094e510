"""kp2d odometry: estimate the trajectory of a camera and a map."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from kp2d_core.commands.arguments import (
    RawHelpFormatter,
    add_detection_arguments,
    add_model_arguments,
    detection_options,
    load_detector,
    positive,
    size,
)
from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.features import Float
from kp2d_core.files import atomic_write
from kp2d_core.odometry.recordings import SCENES, Recording, open_recording
from kp2d_core.odometry.report import (
    format_rows,
    plot_path,
    rows,
    write_html,
    write_json,
    write_ply,
)
from kp2d_core.odometry.runs import (
    BASELINE_SETTINGS,
    Method,
    Run,
    baseline_method,
    remembering,
    run_all,
)
from kp2d_core.odometry.settings import Settings
from kp2d_core.odometry.spoiling import HARDSHIPS, SPOILS
from kp2d_core.odometry.trajectory import write_tum
from kp2d_core.odometry.words import find_words

DESCRIPTION = """\
Estimate the trajectory of a calibrated camera and a map of points from a recording. Where the
ground truth is known, report the errors. The scale is arbitrary with one camera and metric with
two (--stereo).

RECORDING is a folder in the layout of KITTI (image_0/, calib.txt, poses.txt) or TUM (rgb.txt,
intrinsics.txt: fx fy cx cy [k1 k2 p1 p2 [k3]], groundtruth.txt), a bag with camera_info, a video
or a folder of images with --calibration, or a rendered scene: scene:room, scene:ring."""
EXAMPLES = """\
examples:
  kp2d odometry kitti/00 -o out.tum                     also out.causal.tum, out.ply, out.svg
  kp2d odometry kitti/00 --stereo -o out.tum
  kp2d odometry drive.mcap --topic /left/image_rect /right/image_rect --stereo -o out.tum
  kp2d odometry film.mp4 --calibration camera.yaml -o out.tum
  kp2d odometry tum/fr1_xyz --baselines sift orb --seeds 5 --html report
  kp2d odometry scene:ring --no-loops                   the drift without loop closure
  kp2d odometry scene:room --spoil black                the effect of a second of black frames
  kp2d odometry tum/fr1_xyz --hardships --seeds 5       all of these in one table"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = RawHelpFormatter
    parser.add_argument('recording', metavar='RECORDING', help='recording to process; see above')
    parser.add_argument(
        '-o', '--output', type=Path, metavar='FILE.tum',
        help='write the final trajectory (time x y z qx qy qz qw), and next to it the causal '
        'trajectory, the map (.ply) and a plot (.svg)',
    )  # fmt: skip
    source = parser.add_argument_group('recording')
    source.add_argument('--stereo', action='store_true', help='use two cameras: metric scale')
    source.add_argument(
        '--calibration', type=Path, metavar='FILE',
        help="calibration of a video or a folder of images: a YAML file of ROS's "
        'camera_calibration',
    )  # fmt: skip
    source.add_argument(
        '--topic', nargs='+', default=[], metavar='TOPIC', help='image topics of a bag'
    )
    source.add_argument(
        '--truth', type=Path, metavar='FILE.tum', help='ground truth, if not next to the recording'
    )
    source.add_argument(
        '--scene-size', type=size, default=(640, 480), metavar='WxH',
        help=f'image size of {" and ".join(SCENES)} (default: 640x480)',
    )  # fmt: skip
    source.add_argument(
        '--every', type=positive, default=1, metavar='N',
        help='use only every N-th frame (default: %(default)s)',
    )  # fmt: skip
    source.add_argument(
        '--spoil', choices=tuple(SPOILS),
        help='make the recording harder: one second of black or blurred frames, or a jump to '
        'another place and back',
    )  # fmt: skip
    runs = parser.add_argument_group('runs')
    runs.add_argument(
        '--hardships', action='store_true',
        help='also run with every 2nd and 3rd frame and with each of --spoil; show one table',
    )  # fmt: skip
    runs.add_argument(
        '--baselines', nargs='+', default=[], metavar='NAME',
        help=f'also run with classical features: {", ".join(BASELINE_SETTINGS)}',
    )  # fmt: skip
    runs.add_argument(
        '--no-loops', action='store_true', help='do not close loops or join maps at the end'
    )
    runs.add_argument(
        '--seeds', type=positive, default=1, metavar='N',
        help='run each method N times; the table shows the medians (default: %(default)s)',
    )  # fmt: skip
    output = parser.add_argument_group('output')
    output.add_argument(
        '--json', type=Path, metavar='FILE', help='write the figures of all runs to a file'
    )
    output.add_argument(
        '--html', type=Path, metavar='DIR', help='write a report with plots to DIR/index.html'
    )
    add_model_arguments(parser)
    add_detection_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.html and importlib.util.find_spec('matplotlib') is None:
        raise ValueError('the report needs matplotlib: pip install matplotlib')
    methods = [baseline_method(name, args.max_keypoints) for name in args.baselines]
    recording = open_recording(
        args.recording,
        stereo=args.stereo,
        calibration=args.calibration,
        topics=args.topic,
        truth=args.truth,
        size=args.scene_size,
    ).every(args.every)
    if args.spoil:
        recording = SPOILS[args.spoil](recording)
    if recording.note:
        print(recording.note, file=sys.stderr)
    detector = load_detector(args)
    print(f'{detector.runtime.model} on {detector.runtime.description}')
    options = detection_options(args)
    ours = Method(
        detector.runtime.model,
        lambda image: detector.detect(image, **options),
        Settings(),
        words_of(detector),
    )
    methods = [ours, *methods]
    if args.hardships:
        methods = [remembering(method) for method in methods]
    runs = run_all(recording, methods, seeds=args.seeds, loops=not args.no_loops, progress=True)
    print(format_rows(rows(runs, recording)))
    hard = _run_hardships(recording, methods, args) if args.hardships else {}
    if hard:
        print(format_rows(hard))
    if not recording.stereo:
        print('one camera: the scale of trajectory and map is arbitrary')
    if args.output:
        for path in _write(args.output, runs[0], recording):
            print(f'wrote {path}')
    if args.json:
        write_json(args.json, runs, recording, hard)
    if args.html:
        print(f'report in {write_html(args.html, runs, recording)}')
    return 0 if len(runs[0].chosen()) else 1


def words_of(detector: KeypointDetector) -> Float | None:
    """Return the visual words of the detector's model; say why if its file cannot be used."""
    try:
        words = find_words(detector.runtime.model, detector.runtime.digest)
    except FileError as error:
        print(f'the visual words are learned from the images: {error}', file=sys.stderr)
        return None
    return None if words is None else words.values


def _run_hardships(
    recording: Recording, methods: list[Method], args: argparse.Namespace
) -> dict[str, dict[str, str]]:
    """Run each method with each hardship; return one row each."""
    table: dict[str, dict[str, str]] = {}
    for name, change in HARDSHIPS.items():
        harder = change(recording)
        harder = replace(harder, name=f'{recording.name}, {name}')
        found = run_all(harder, methods, seeds=args.seeds, loops=not args.no_loops, progress=True)
        for method, row in rows(found, harder).items():
            # Most features were extracted for the recording as it is.
            del row['features ms'], row['Hz']
            table[f'{method}, {name}'] = row
    return table


def _write(output: Path, run: Run, recording: Recording) -> list[Path]:
    """Write the files of the first run with our features; return their paths."""
    mine = run.chosen()
    causal = np.flatnonzero(run.causal_maps == run.largest)
    written = [output, output.with_suffix('.causal.tum'), output.with_suffix('.ply')]
    write_tum(output, run.stamps[mine], run.final[mine])
    write_tum(written[1], run.stamps[causal], run.causal[causal])
    write_ply(written[2], run.points)
    if importlib.util.find_spec('matplotlib') is not None:
        written.append(output.with_suffix('.svg'))
        with atomic_write(written[3]) as temporary:
            temporary.write_bytes(plot_path([run], recording))
    return written
