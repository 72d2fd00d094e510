"""`kp2d bench node`: measures the node in separate processes and compares it with limits."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from kp2d_core.checks import MOST_THREADS
from kp2d_core.commands.arguments import positive, real_number, whole_number
from kp2d_core.files import atomic_write
from kp2d_ros.diagnostics import WINDOW
from kp2d_ros.startup import use_fastdds_profile

if TYPE_CHECKING:
    from kp2d_ros.benchmark.rig import Rig
    from kp2d_ros.benchmark.stereo import Window

PARTS = ('overhead', 'camera', 'overload', 'stereo', 'soak', 'changes', 'shutdown')
OVERHEAD = 6.0  # ms, at most
PROCESSED = 25.0  # Hz, of a camera at 30 Hz, at least
LAG = 2.5  # inference times, at most
STEREO = 1.3  # times the rate of two nodes, at least
GROWTH = 2.0  # MB per minute, at most: within the noise of the allocator
END = 2.0  # seconds, at most
CAMERA_RATE = 30.0  # Hz
SLOW_MODEL = 0.2  # seconds a frame


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--model', default='small', help='model, or a variant with random weights')
    parser.add_argument('--runtime', default='auto', help='inference runtime')
    parser.add_argument('--precision', default='auto', help='auto, fp32, fp16 or int8')
    parser.add_argument(
        '--threads', type=whole_number(0, MOST_THREADS), default=0,
        help='CPU threads; 0: the runtime decides',
    )  # fmt: skip
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=PARTS, help='what to measure')
    parser.add_argument('--frames', type=positive, default=150, help='frames of the overhead part')
    parser.add_argument(
        '--seconds', type=real_number(above=0), default=30.0,
        help='length of the camera part, of the overload part and of the stereo part',
    )  # fmt: skip
    parser.add_argument(
        '--rates', type=real_number(above=0), nargs='+', default=[CAMERA_RATE], metavar='HZ',
        help='camera rates of the stereo part; the first one is compared with the limit',
    )  # fmt: skip
    parser.add_argument(
        '--soak',
        type=real_number(least=0),
        default=600.0,
        help='length of the soak part, and of the changes part, in seconds',
    )
    parser.add_argument(
        '--domain', type=whole_number(0, 232), default=91,
        help='ROS_DOMAIN_ID; no other node should use it',
    )  # fmt: skip
    parser.add_argument('--json', type=Path, metavar='FILE', help='write all figures to a file')


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST')
    use_fastdds_profile()
    report: dict[str, Any] = {
        'machine': f'{platform.processor() or platform.machine()}, {os.cpu_count()} cores',
        'load': os.getloadavg()[0],
    }
    print(f'{report["machine"]}, load {report["load"]:.1f}: 640x480, 1000 keypoints')
    measures = {
        'overhead': overhead, 'camera': camera, 'overload': overload, 'stereo': stereo,
        'soak': soak, 'changes': changes, 'shutdown': shutdown,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            report[part] = measures[part](args, Path(folder))
            met = 'met' if report[part]['met'] else 'MISSED'
            print(f'{part:9} {met:7} {report[part]["sentence"]}', flush=True)
    if args.json:
        with atomic_write(args.json) as path:
            path.write_text(json.dumps(report, indent=2) + '\n')
    return 0


def rig(args: argparse.Namespace, folder: Path, model: str | None = None, **others: Any) -> Rig:
    from kp2d_ros.benchmark.rig import Rig

    return Rig(args.domain, **parameters(args, folder, model), **others)


def parameters(args: argparse.Namespace, folder: Path, model: str | None = None) -> dict[str, Any]:
    """Of the node; a model of random weights is written into the folder."""
    from kp2d_core.architecture import VARIANTS
    from kp2d_core.benchmarks.contestants import random_checkpoint
    from kp2d_core.checkpoint import save_checkpoint, shipped_models

    name = model or args.model
    if name in VARIANTS and name not in shipped_models():
        path = folder / f'{name}.safetensors'
        save_checkpoint(path, random_checkpoint(name))
        name = str(path)
    return {
        'model': name, 'runtime': args.runtime, 'precision': args.precision,
        'threads': args.threads, 'max_keypoints': 1000,
    }  # fmt: skip


def overhead(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """From publishing an image to receiving its keypoints, without the inference in between."""
    result: dict[str, Any] = {}
    with rig(args, folder) as bench:
        bench.ready()
        for name, track in (('with tracking', True), ('without', False)):
            bench.set(track=track)
            bench.answers.clear()
            for _ in tqdm(range(args.frames), f'overhead {name}'):
                bench.exchange()
            bench.spin(lambda: False, 0.2)
            traces = bench.traces()
            # Frame by frame: what others do on this machine hits both figures of a frame.
            latency, inference, tracking = np.array([
                (1e3 * seconds, *traces[stamp])
                for stamp, seconds in bench.answers.items() if stamp in traces
            ]).T  # fmt: skip
            result[name] = {
                'latency_p50_ms': float(np.median(latency)),
                'inference_p50_ms': float(np.median(inference)),
                'tracking_p50_ms': float(np.median(tracking)),
                'overhead_p50_ms': float(np.median(latency - inference)),
            }
        result['runtime'] = bench.fresh_figures()['runtime']
    with_tracking, without = result['with tracking'], result['without']
    return {
        **result,
        'met': with_tracking['overhead_p50_ms'] <= OVERHEAD,
        'sentence': (
            f'{with_tracking["overhead_p50_ms"]:.1f} ms beyond the inference of '
            f'{with_tracking["inference_p50_ms"]:.1f} ms, matching and verification included '
            f'({without["overhead_p50_ms"]:.1f} ms without them); at most {OVERHEAD:g}'
        ),
    }


def camera(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A camera at 30 Hz."""
    with rig(args, folder) as bench:
        bench.ready()
        bench.answers.clear()
        with tqdm(total=round(args.seconds), desc='camera', unit='s') as bar:
            for passed in bench.film(CAMERA_RATE, args.seconds):
                bar.update(int(passed) - bar.n)
        rate = len(bench.answers) / args.seconds
        latency = float(np.median([*bench.answers.values()]))
    return {
        'rate_hz': rate, 'latency_p50_s': latency, 'met': rate >= PROCESSED,
        'sentence': (
            f'{rate:.1f} Hz processed of {CAMERA_RATE:g}, latency {latency * 1e3:.0f} ms; at '
            f'least {PROCESSED:g}'
        ),
    }  # fmt: skip


def overload(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A camera at 30 Hz, a model at about 5 Hz."""
    with rig(args, folder, 'v4') as bench:
        bench.ready()
        size = 640
        for _ in range(4):  # find a size at which a frame takes as long as it should
            began = time.perf_counter()
            while time.perf_counter() - began < WINDOW + 0.5:  # the figures are of that time
                bench.exchange()
            took = float(bench.fresh_figures()['inference p50 (ms)']) / 1e3
            size = int(np.clip(size * np.sqrt(SLOW_MODEL / took), 96, 1600)) // 8 * 8
            bench.set(working_size=size)
        bench.sent.clear()
        bench.answers.clear()
        bench.fresh_figures()
        before = {name: bench.count(name) for name in ('received', 'processed', 'dropped', 'lost')}
        inferences = []
        with tqdm(total=round(args.seconds), desc='overload', unit='s') as bar:
            for passed in bench.film(CAMERA_RATE, args.seconds):
                inferences.append(float(bench.figures['inference p50 (ms)']) / 1e3)
                bar.update(int(passed) - bar.n)
        bench.spin(lambda: False, 2.0)
        bench.fresh_figures()
        counts = {name: bench.count(name) - value for name, value in before.items()}
        sent = len(bench.sent)
        latencies = np.array([bench.answers[s] for s in sorted(bench.answers)])
    inference = float(np.median(inferences))
    p95 = float(np.percentile(latencies, 95))
    halves = [float(np.percentile(part, 95)) for part in np.array_split(latencies, 2)]
    return {
        'inference_p50_s': inference, 'latency_p95_s': p95, 'latency_p95_halves_s': halves,
        'working_size': size, 'sent': sent, **counts,
        'met': p95 <= LAG * inference and counts['received'] + counts['lost'] == sent,
        'sentence': (
            f'p95 {p95 * 1e3:.0f} ms = {p95 / inference:.2f} inferences of '
            f'{inference * 1e3:.0f} ms (first half {halves[0] * 1e3:.0f}, second '
            f'{halves[1] * 1e3:.0f} ms); of {sent} frames {counts["processed"]} processed, '
            f'{counts["dropped"]} dropped, {counts["lost"]} lost; at most {LAG:g}'
        ),
    }  # fmt: skip


def stereo(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Two cameras: one node for both, and one node for each, by turns."""
    from kp2d_ros.benchmark.stereo import compare, inference_alone

    given = parameters(args, folder)
    alone = inference_alone(given)
    rows = [
        comparison(rate, windows)
        for rate, windows in compare(args.domain, given, args.rates, args.seconds).items()
    ]
    ratio = rows[0]['ratio']
    return {
        'rates': rows, 'inference_ms': alone, 'ratio': ratio, 'met': ratio >= STEREO,
        'sentence': '; '.join([
            *(row['sentence'] for row in rows),
            f'CPU time of the network alone {alone:.0f} ms; at least {STEREO:g}',
        ]),
    }  # fmt: skip


def comparison(rate: float, windows: dict[str, list[Window]]) -> dict[str, Any]:
    """One node and two nodes, with cameras of one rate."""
    from kp2d_ros.benchmark.stereo import ratio_of

    ratio = ratio_of(windows)
    one, two = (
        {
            name: float(np.median([getattr(each, name) for each in of]))
            for name in ('rate', 'images', 'spent', 'latency')
        }
        for of in windows.values()
    )
    return {
        'camera_hz': rate, 'ratio': ratio,
        'windows': {who: [asdict(each) for each in of] for who, of in windows.items()},
        'sentence': (
            f'cameras at {rate:g} Hz: {one["rate"]:.1f} pairs per second with one node, '
            f'{two["rate"]:.1f} with two: {ratio:.2f} times as many ({one["images"]:.1f} and '
            f'{two["images"]:.1f} images per camera, {one["spent"]:.0f} and {two["spent"]:.0f} ms '
            f'of CPU time and {1e3 * one["latency"]:.0f} and {1e3 * two["latency"]:.0f} ms of '
            f'latency per pair)'
        ),
    }  # fmt: skip


def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Send the next image as soon as the keypoints of the last one arrive."""
    from kp2d_ros.benchmark.changes import growth

    memory: list[float] = []
    times: list[float] = []
    with rig(args, folder) as bench:
        bench.ready()
        for _ in range(min(args.frames, 50)):
            bench.exchange()
        threads = bench.threads()
        bench.fresh_figures()
        names = ('received', 'processed', 'dropped', 'skipped', 'damaged', 'failed', 'lost')
        before = {name: bench.count(name) for name in names}
        bench.sent.clear()
        began = time.perf_counter()
        with tqdm(total=round(args.soak), desc='soak', unit='s') as bar:
            while (passed := time.perf_counter() - began) < args.soak:
                bench.exchange()
                if passed >= len(memory):
                    memory.append(bench.memory())
                    times.append(passed)
                    bar.update(int(passed) - bar.n)
        sent = len(bench.sent)
        bench.spin(lambda: False, 1.0)
        bench.fresh_figures()
        counts = {name: bench.count(name) - value for name, value in before.items()}
        threads_after = bench.threads()
        rate = counts['processed'] / args.soak
    accounted = counts['received'] + counts['lost'] == sent and counts['received'] == sum(
        counts[name] for name in ('processed', 'dropped', 'skipped', 'damaged', 'failed')
    )
    third = len(memory) // 3
    grown = growth(times, memory)
    return {
        'rate_hz': rate, 'memory_mb': memory[::10], 'growth_mb_per_minute': grown,
        'threads': [threads, threads_after], 'sent': sent, **counts,
        'met': abs(grown) <= GROWTH and accounted and threads_after <= threads,
        'sentence': (
            f'{args.soak:.0f} s at {rate:.1f} Hz: {memory[third]:.0f} MB to {memory[-1]:.0f} MB '
            f'({grown:+.2f} MB a minute), threads {threads} to {threads_after}; of {sent} frames '
            f'{counts["processed"]} processed, {counts["dropped"]} dropped, {counts["lost"]} '
            f'lost, {"all" if accounted else "NOT all"} accounted for'
        ),
    }  # fmt: skip


def changes(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings, image sizes and lifecycle states change all the time, with small images."""
    from kp2d_ros.benchmark.changes import growth, memory_under

    with rig(args, folder) as bench:
        bench.ready()
        times, memory, unanswered = memory_under(bench, args.soak)
    grown, middle = growth(times, memory), memory[len(memory) // 3]
    return {
        'seconds': times, 'memory_mb': memory, 'growth_mb_per_minute': grown,
        'changes': len(memory), 'unanswered': unanswered,
        'met': grown <= GROWTH and not unanswered,
        'sentence': (
            f'{len(memory)} changes in {times[-1]:.0f} s: {middle:.0f} MB after a third, '
            f'{memory[-1]:.0f} MB in the end, {max(memory):.0f} MB at most ({grown:+.2f} MB a '
            f'minute); {unanswered} frames without an answer'
        ),
    }  # fmt: skip


def shutdown(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """From the signal to the end of the process, in every state."""
    from lifecycle_msgs.msg import Transition

    took: dict[str, float] = {}
    states = ('unconfigured', 'loading', 'inactive', 'active', 'busy')
    for state in tqdm(states, 'shutdown'):
        for how in (signal.SIGINT, signal.SIGTERM):
            managed = state in ('unconfigured', 'inactive')
            model = 'v4' if state == 'busy' else None
            with rig(args, folder, model, managed=managed) as bench:
                if state in ('active', 'busy'):
                    bench.ready()
                elif state == 'loading':
                    bench.wait_for_node()
                else:
                    bench.fresh_figures()
                if state == 'inactive':
                    bench.transition(Transition.TRANSITION_CONFIGURE)
                if state == 'busy':
                    bench.publish()
                    bench.spin(lambda: False, 0.1)
                took[f'{state} {how.name}'] = bench.end(how)
    worst = max(took, key=lambda name: took[name])
    return {
        'seconds': took,
        'met': took[worst] <= END,
        'sentence': (
            f'{took[worst]:.2f} s in the worst case ({worst}), the median of {len(took)} is '
            f'{np.median(list(took.values())):.2f} s; at most {END:g}'
        ),
    }
