"""kp2d export: write an ONNX model for one size and precision, and build TensorRT engines."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from kp2d_core.architecture import CELL
from kp2d_core.checkpoint import (
    WEIGHTS_FOLDER,
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
)
from kp2d_core.commands.arguments import positive, size
from kp2d_core.detector import SPARE
from kp2d_core.errors import FileError
from kp2d_core.export.quantization import (
    Ranges,
    calibration_path,
    load_calibration,
)
from kp2d_core.export.source import PRECISIONS, TENSORRT_TOP_K, Profile
from kp2d_core.files import atomic_write
from kp2d_core.images import Image, find_images, read_image
from kp2d_core.runtimes import DEFAULT_MODEL, available_runtimes

MOST_IMAGES = 64  # for the calibration; more images hardly change the ranges


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'model', nargs='?', default='auto',
        help='name of a shipped model, or a .safetensors file (default: small, as in the node)',
    )  # fmt: skip
    parser.add_argument(
        '-o', '--output', type=Path, metavar='FILE',
        help='the ONNX file (default: MODEL-WIDTHxHEIGHT-PRECISION.onnx)',
    )  # fmt: skip
    graph = parser.add_argument_group('graph')
    graph.add_argument(
        '--size', type=size, default='640x480', metavar='WxH',
        help='image size; both sides are multiples of 8',
    )  # fmt: skip
    graph.add_argument(
        '--top-k', type=positive, metavar='K',
        help='number of keypoints in the output, copies included (default: enough for about 1000 '
        f'places, or all cells; TensorRT allows at most {TENSORRT_TOP_K})',
    )  # fmt: skip
    graph.add_argument(
        '--batch', type=batch, default=1, metavar='N', help="images per batch, or 'dynamic'"
    )
    graph.add_argument('--mono', action='store_true', help='take gray images instead of RGB')
    graph.add_argument(
        '--precision', choices=PRECISIONS, default='fp32', help='precision of the arithmetic'
    )
    quality = parser.add_argument_group('int8 calibration and loss of quality')
    quality.add_argument(
        '--calibrate', type=Path, metavar='FOLDER',
        help='measure the ranges for int8 on these images, which should resemble your own; the '
        'ranges are saved next to the model and serve every size (default: the ranges that come '
        'with the model)',
    )  # fmt: skip
    quality.add_argument(
        '--save-ranges', type=Path, metavar='JSON',
        help='file for the ranges of --calibrate (default: MODEL.int8.json next to the model)',
    )  # fmt: skip
    quality.add_argument(
        '--evaluate', type=Path, metavar='FOLDER',
        help='measure the loss of quality on sequences in HPatches layout (default: on pairs made '
        'from the images of --calibrate)',
    )  # fmt: skip
    engines = parser.add_argument_group('TensorRT')
    engines.add_argument(
        '--tensorrt', action='store_true',
        help='also build the TensorRT engine and store it in the engine cache',
    )  # fmt: skip
    engines.add_argument(
        '--compute-capability', type=positive, nargs='+', default=[], metavar='CC',
        help='build engines for GPUs with these compute capabilities, such as 86 89; they need '
        'not be in this machine (TensorRT-RTX only)',
    )  # fmt: skip
    engines.add_argument(
        '--engines', type=Path, metavar='FOLDER',
        help='folder of the engine cache (default: ~/.cache/kp2d/engines, where the node looks)',
    )  # fmt: skip


def batch(text: str) -> int | None:
    return None if text == 'dynamic' else positive(text)


def run(args: argparse.Namespace) -> int:
    engines = bool(args.tensorrt or args.compute_capability)
    path = find_checkpoint(DEFAULT_MODEL if args.model == 'auto' else args.model)
    checkpoint = load_checkpoint(path)
    profile = profile_of(args, checkpoint.architecture.cell)
    if args.calibrate and profile.precision == 'fp32':
        raise ValueError('--calibrate is for --precision int8, or to measure the loss of fp16')
    images = read_some(args.calibrate) if args.calibrate else []
    ranges = None
    if profile.precision == 'int8':
        ranges = find_ranges(path, checkpoint, images, args.save_ranges)
    from kp2d_core.export.graph import build_graph  # needs onnx

    graph = build_graph(checkpoint, profile, ranges).SerializeToString()
    output = args.output or Path(f'{path.stem}-{profile.width}x{profile.height}-'
                                 f'{profile.precision}.onnx')  # fmt: skip
    with atomic_write(output) as temporary:
        temporary.write_bytes(graph)
    print(f'{output}: {profile}, {len(graph) / 1e6:.1f} MB')
    if profile.precision != 'fp32':
        print_loss(args, path, output, profile, images)
    if engines:
        build_engines(args, graph, profile)
    return 0


def profile_of(args: argparse.Namespace, cell: int) -> Profile:
    width, height = args.size
    if width % CELL or height % CELL:
        fitting = f'{width // CELL * CELL}x{height // CELL * CELL}'
        raise ValueError(f'--size must be multiples of {CELL}, such as {fitting}')
    profile = Profile(height, width, 1, args.batch, args.mono, args.precision, cell)
    top_k = args.top_k or min(round(1000 * SPARE[cell]), TENSORRT_TOP_K, profile.cells)
    if top_k > TENSORRT_TOP_K and (args.tensorrt or args.compute_capability):
        raise ValueError(f'--top-k can be at most {TENSORRT_TOP_K}, the limit of TensorRT')
    return replace(profile, top_k=top_k)


def read_some(folder: Path) -> list[Image]:
    """Read the images of a folder; if there are many, an evenly spaced selection."""
    if not folder.exists():
        raise FileError(f'there is no folder {folder}')
    paths = find_images([folder])
    if not paths:
        raise FileError(f'there is no image in {folder}')
    step = max(1.0, len(paths) / MOST_IMAGES)
    return [read_image(paths[int(i * step)]) for i in range(min(MOST_IMAGES, len(paths)))]


def find_ranges(
    path: Path, checkpoint: Checkpoint, images: list[Image], save_as: Path | None
) -> Ranges:
    """Measure ranges on the images and save them next to the model, or read those of the model."""
    ranges_path = calibration_path(path)
    if images:
        from kp2d_core.export.calibration import calibrate

        calibration = calibrate(checkpoint, images, progress=True)
        if save_as is None and path.parent != WEIGHTS_FOLDER:
            save_as = ranges_path
        if save_as is not None:
            calibration.save(save_as)
            print(f'{save_as}: int8 ranges of {len(images)} images')
        return calibration.ranges
    if not ranges_path.is_file():
        raise ValueError(f'int8 needs images: --calibrate FOLDER (there is no {ranges_path})')
    return load_calibration(ranges_path, checkpoint).ranges


def print_loss(
    args: argparse.Namespace, path: Path, output: Path, profile: Profile, images: list[Image]
) -> None:
    if not images and args.evaluate is None:
        print(
            f'the loss of quality with {profile.precision} was not measured: give --evaluate '
            'FOLDER or --calibrate FOLDER'
        )
        return
    from kp2d_core.detector import KeypointDetector
    from kp2d_core.export.calibration import compare, format_comparison

    usable = [s.name for s in available_runtimes() if s.available and s.name != 'torch']
    if not usable:
        print(
            f'the loss of quality with {profile.precision} was not measured: no runtime for ONNX '
            'is installed'
        )
        return
    metrics = compare(
        KeypointDetector.load(path, runtime=usable[0], precision='fp32'),
        KeypointDetector.load(output, runtime=usable[0]),
        profile,
        sequences=args.evaluate,
        images=images,
    )
    where = args.evaluate or f'pairs made of {args.calibrate}'
    print(f'on {where}, run by {usable[0]}:\n{format_comparison(metrics)}')


def build_engines(args: argparse.Namespace, graph: bytes, profile: Profile) -> None:
    from kp2d_core.export.cache import CacheKey, CompiledCache
    from kp2d_core.export.engine import (
        build_engine,
        device_key,
        library_version,
        load_tensorrt,
    )
    from kp2d_core.runtimes.base import cache_folder
    from kp2d_core.runtimes.cuda import cuda_device

    trt = load_tensorrt()
    cache = CompiledCache(args.engines or cache_folder('engines'))
    device = cuda_device()
    targets: list[tuple[str, list[int]]] = [
        (f'sm_{capability}', [capability]) for capability in args.compute_capability
    ]
    if not targets:
        if not device.available:
            raise ValueError(
                f'{device.problem}; for other machines, name their GPUs: --compute-capability 86'
            )
        targets = [(device_key(trt, device.name, device.compute_capability), [])]
    for name, capabilities in targets:
        key = CacheKey.of(graph, profile, library_version(trt), name)

        def build(capabilities: list[int] = capabilities) -> bytes:
            return build_engine(
                trt, graph, profile, compute_capabilities=capabilities, progress=True
            )

        engine, built = cache.get_or_build(key, build, must_keep=True)
        state = 'built' if built else 'in the cache already'
        print(
            f'{cache.path(key)}: {profile.precision} engine for {name}, {library_version(trt)}, '
            f'{len(engine) / 1e6:.1f} MB, {state}'
        )
