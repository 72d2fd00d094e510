"""`kp2d bench`: runtimes, precisions and sizes, compared with V4 in the authors' code (1.0x)."""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from kp2d_core.architecture import CELL
from kp2d_core.benchmarks import contestants as field
from kp2d_core.benchmarks.contestants import BASELINE, Contestant, WholeWay, summary, time_in_turns
from kp2d_core.benchmarks.process import start_up
from kp2d_core.commands.arguments import positive, size
from kp2d_core.evaluation.foreign_network import RUNTIMES
from kp2d_core.export.source import PRECISIONS
from kp2d_core.features import prepare
from kp2d_core.files import atomic_write
from kp2d_core.images import Image, Size, read_image, size_of
from kp2d_core.runtimes import available_runtimes
from kp2d_core.threads import usable_cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--models', nargs='+', default=['v4', 'small'],
        help='shipped models, model files, or variants of the network with random weights '
        '(default: v4 small)',
    )  # fmt: skip
    parser.add_argument(
        '--sizes', nargs='+', type=size, default=[(320, 240), (640, 480)], metavar='WxH',
        help='image sizes (default: 320x240 640x480)',
    )  # fmt: skip
    parser.add_argument(
        '--precisions', nargs='+', choices=PRECISIONS, default=['fp32', 'int8'],
        help='precisions to measure (default: fp32 int8)',
    )  # fmt: skip
    parser.add_argument(
        '--runtimes', nargs='+', metavar='NAME', help='measure only these (default: all)'
    )
    parser.add_argument(
        '--top-k', type=positive, metavar='K',
        help='number of keypoints (default: 300; 1000 from 640x480 on)',
    )  # fmt: skip
    parser.add_argument('--threads', type=positive, default=usable_cores(), help='CPU threads')
    parser.add_argument(
        '--rounds', type=positive, default=12,
        help='number of rounds; in each round every contestant runs 3 times',
    )  # fmt: skip
    parser.add_argument(
        '--cpu-time', action='store_true',
        help='measure CPU time, which other processes hardly affect; best with --threads 1',
    )  # fmt: skip
    parser.add_argument(
        '--image', type=Path, metavar='FILE', help='photograph (default: one of scikit-image)'
    )
    parser.add_argument(
        '--beside', type=Path, nargs='+', default=[], metavar='FILE',
        help='also measure these networks, such as an exported XFeat: ONNX or OpenVINO (.xml)',
    )  # fmt: skip
    parser.add_argument(
        '--quick', action='store_true', help='do not measure memory and start-up time'
    )
    parser.add_argument('--json', type=Path, metavar='FILE', help='write all figures to a file')


def run(args: argparse.Namespace) -> int:
    photograph = find_photograph(args.image)
    report: dict[str, Any] = {
        'machine': platform.processor() or platform.machine(),
        'threads': args.threads,
        'clock': 'processor' if args.cpu_time else 'wall',
        'runtimes': {s.name: s.detail for s in available_runtimes() if s.available},
        'sizes': {},
    }
    for wanted in args.sizes:
        key = f'{wanted[0]}x{wanted[1]}'
        report['sizes'][key] = measure(args, photograph, wanted)
        print(format_size(key, report['sizes'][key], args.threads), flush=True)
    if args.json:
        with atomic_write(args.json) as temporary:
            temporary.write_text(json.dumps(report, indent=2) + '\n')
    return 0


def measure(args: argparse.Namespace, photograph: Image, wanted: Size) -> dict[str, Any]:
    """Measure all figures of one size."""
    image = prepare(photograph, wanted)[0]
    cells = (image.shape[0] // CELL) * (image.shape[1] // CELL)
    top_k = args.top_k or (1000 if wanted[0] * wanted[1] >= 640 * 480 else 300)
    top_k = min(top_k, cells)
    entries = enter(args, image, top_k)
    timed = {entry.name: entry.run for entry in entries}
    mine = {entry.name: entry.ours for entry in entries if entry.ours}
    whole = {name: WholeWay(one.opened, image, top_k) for name, one in mine.items()}
    timed |= {f'{name}, frame to features': way for name, way in whole.items()}
    timed |= around_inference([one.model for one in mine.values()], photograph, wanted, top_k)
    progress = f'{wanted[0]}x{wanted[1]}'
    clock = time.process_time if args.cpu_time else time.perf_counter
    times = time_in_turns(timed, args.rounds, clock=clock, progress=progress)
    rows = {name: summary(values) for name, values in times.items()}
    base = rows.get(BASELINE)
    for entry in entries:
        row: dict[str, Any] = rows[entry.name]
        if base is not None:
            row['times_faster'] = base['median_ms'] / row['median_ms']
        if entry.ours is None:
            continue
        row['frame_to_features_ms'] = rows.pop(f'{entry.name}, frame to features')['median_ms']
        row['not_inference'] = float(np.median(whole[entry.name].shares))
        if not args.quick:
            one = entry.ours
            padded = size_of(image)
            row |= start_up(one.model, one.runtime, one.precision, args.threads, padded, top_k)
    return {'top_k': top_k, 'rows': rows}


def enter(args: argparse.Namespace, image: Image, top_k: int) -> list[Contestant]:
    usable = [status.name for status in available_runtimes() if status.available]
    unknown = sorted(set(args.runtimes or []) - set(usable))
    if unknown:
        raise ValueError(f'cannot be used here: {", ".join(unknown)}; see `kp2d info`')
    chosen = [name for name in usable if not args.runtimes or name in args.runtimes]
    entries = [field.authors_way(args.threads, image, top_k)] if 'torch' in usable else []
    for model in args.models:
        for precision in args.precisions:
            for runtime in chosen:
                if runtime == 'torch' and precision != 'fp32':
                    continue
                entries.append(field.ours(model, runtime, precision, args.threads, image, top_k))
    entries.append(field.sift(image, top_k))
    for path in args.beside:
        for runtime in (name for name in chosen if name in RUNTIMES):
            if runtime == 'openvino' or path.suffix != '.xml':
                entries.append(field.other_network(path, runtime, args.threads, image))
    return entries


def around_inference(
    models: list[str], photograph: Image, wanted: Size, top_k: int
) -> dict[str, Any]:
    """Measure what surrounds the network: resizing a frame of twice the size, and matching."""
    large = np.asarray(cv2.resize(photograph, (2 * wanted[0], 2 * wanted[1])))
    parts: dict[str, Any] = {'resize a frame of twice the size': lambda: prepare(large, wanted)}
    for model in dict.fromkeys(models):
        parts[f'match {top_k} with {top_k} of {model}'] = field.matching(model, top_k)
    return parts


def find_photograph(path: Path | None) -> Image:
    """Read the given photograph, else one of scikit-image's, else make noise at several scales."""
    if path is not None:
        return read_image(path)
    try:
        from skimage import data

        return np.asarray(data.astronaut(), np.uint8)
    except ImportError:
        random = np.random.default_rng(0)
        layers = [
            cv2.resize(random.normal(0, 1, (side, side, 3)), (512, 512)) for side in (8, 32, 128)
        ]
        noise = 128 + 40 * np.sum(layers, axis=0)
        return np.clip(noise, 0, 255).astype(np.uint8)


def format_size(key: str, measured: dict[str, Any], threads: int) -> str:
    """Format a table, fastest last."""
    head = ['', 'median ms', 'p95', 'faster', 'frame to features', 'not inference',
            'peak MB', 'first result s, warm (cold)']  # fmt: skip
    rows = [head]
    for name, row in measured['rows'].items():
        seconds = ''
        if 'first_result_warm_s' in row:
            seconds = f'{row["first_result_warm_s"]:.2f} ({row["first_result_cold_s"]:.2f})'
        rows.append([
            name,
            f'{row["median_ms"]:.1f}',
            f'{row["p95_ms"]:.1f}',
            f'{row["times_faster"]:.1f}x' if 'times_faster' in row else '',
            f'{row["frame_to_features_ms"]:.1f}' if 'frame_to_features_ms' in row else '',
            f'{100 * row["not_inference"]:.1f} %' if 'not_inference' in row else '',
            f'{row["peak_memory_mb"]:.0f}' if 'peak_memory_mb' in row else '',
            seconds,
        ])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        '  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    title = f'{key}, {measured["top_k"]} keypoints, {threads} threads'
    return '\n'.join([title, *(f'  {line}'.rstrip() for line in lines), ''])
