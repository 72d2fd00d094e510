"""Is a trained IO-Net a good judge of matches? python -m kp2d_core.benchmarks.judge

Trains the paper's IO-Net on matches of a fixed model: of pairs of one plane, as in the paper, and
of rendered rooms and corridors, whose camera moves. Then verifies matches of real images with it
and without it: only those that it accepts, or all of them with the surest tried first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from kp2d_core.camera import Camera
from kp2d_core.detector import KeypointDetector
from kp2d_core.evaluation.camera_paths import load_camera_path
from kp2d_core.evaluation.hpatches import load_sequences, rescale
from kp2d_core.evaluation.metrics import area_under_curve
from kp2d_core.evaluation.motion import FAILED, WITHIN, choose_pairs, motion_errors
from kp2d_core.features import Features
from kp2d_core.geometry import Matrix, warp_points
from kp2d_core.images import Image, read_image, size_of
from kp2d_core.matching import as_float32, find_neighbours, match
from kp2d_core.networks.io_net import IONet
from kp2d_core.odometry.geometry import exp_rotation, rigid
from kp2d_core.training.photographs import find_photographs
from kp2d_core.verification import distances_to, verify
from kp2d_core.views.homography import HomographyConfig
from kp2d_core.views.pairs import OTHER_LIGHT, Framing, make_pair
from kp2d_core.views.scene import Scene
from kp2d_core.views.worlds import ring, ring_path, room, room_path, view_camera

Values = NDArray[np.float32]  # one for each match

SIZE = (640, 480)
RIGHT = 3.0  # px from the truth
HIDDEN = 0.05  # relative difference of depths of a point that the other camera does not see
PLANES = HomographyConfig(1.0, (0.5, 1.25), 90.0, 0.25, 120.0, False, 2.0)
TEXTURES = 16  # photographs in a scene
PAIRS_OF_A_SCENE = 25
BATCH = 16
CORNERS = np.array([[0, 0], [319, 0], [319, 239], [0, 239]], np.float64)  # of HPatches images
EPIPOLAR = 1.0  # px, largest error of an inlier of a motion


@dataclass(frozen=True)
class Judged:
    """Each point of one image with its nearest neighbour in the other."""

    first: NDArray[np.float32]  # (M, 2)
    second: NDArray[np.float32]
    distances: Values  # of the descriptors
    ratios: Values  # of the distances to the nearest and second nearest
    mutual: NDArray[np.bool_]
    size: tuple[int, int]

    @staticmethod
    def of(first: Features, second: Features, size: tuple[int, int]) -> Judged:
        found = find_neighbours(as_float32(first), as_float32(second), None, runner_up=True)
        distances, others = (
            np.sqrt(np.maximum(2 - 2 * each, 1e-6)) for each in (found.best, found.runner_up)
        )
        here = match(first, second).indices[:, 0]
        return Judged(
            first.keypoints,
            second.keypoints[found.nearest],
            distances,
            np.asarray(distances / others, np.float32),
            np.isin(np.arange(len(first)), here),
            size,
        )

    def seen_by_io_net(self) -> torch.Tensor:
        """Its five inputs (5, M): positions in [-1, 1] and the distance of the descriptors."""
        scale = 2 / np.asarray(self.size, np.float32)
        rows = [self.first.T * scale[:, None] - 1, self.second.T * scale[:, None] - 1]
        return torch.from_numpy(np.vstack([*rows, self.distances]).astype(np.float32))


def planes(
    detector: KeypointDetector, photographs: list[Path], random: np.random.Generator
) -> Iterator[tuple[Judged, NDArray[np.bool_]]]:
    """Pairs of one photograph under a homography, as the paper trains IO-Net."""
    while True:
        image = read_image(photographs[random.integers(len(photographs))])
        framing = Framing(SIZE, whole=False, short_side=(480.0, 640.0))
        pair = make_pair(image, random, framing, OTHER_LIGHT, PLANES)
        first, second = (detect(detector, view) for view in (pair.first, pair.second))
        judged = Judged.of(first, second, SIZE)
        there = warp_points(judged.first, pair.first_to_second)
        yield judged, np.linalg.norm(there - judged.second, axis=1) <= RIGHT


def motions(
    detector: KeypointDetector, photographs: list[Path], random: np.random.Generator
) -> Iterator[tuple[Judged, NDArray[np.bool_]]]:
    """Pairs of a camera that moves through rendered rooms and corridors."""
    camera = view_camera(SIZE)
    while True:
        chosen = random.choice(len(photographs), TEXTURES, replace=False)
        images = [read_image(photographs[number]) for number in chosen]
        seed = int(random.integers(1 << 30))
        if random.random() < 0.5:
            scene, way, farthest = room(images, seed), room_path(200), 30
        else:
            scene, way, farthest = ring(images, seed), ring_path(0.1), 50
        for _ in range(PAIRS_OF_A_SCENE):
            start = int(random.integers(len(way) - farthest))
            here, there = way[start], way[start + int(random.integers(3, farthest))]
            there = there @ rigid(exp_rotation(random.normal(0, 0.1, 3)), np.zeros(3))
            if random.random() < 0.5:
                here, there = there, here
            yield view_pair(detector, scene, camera, here, there)


def view_pair(
    detector: KeypointDetector, scene: Scene, camera: Camera, here: Matrix, there: Matrix
) -> tuple[Judged, NDArray[np.bool_]]:
    (one, depth), (two, depth_there) = (
        scene.view_with_depth(camera, pose) for pose in (here, there)
    )
    judged = Judged.of(detect(detector, one), detect(detector, two), SIZE)
    x, y = np.clip(np.rint(judged.first).astype(int), 0, np.array(SIZE) - 1).T
    rays = np.column_stack([judged.first, np.ones(len(x))]) @ np.linalg.inv(camera.matrix).T
    with np.errstate(invalid='ignore', over='ignore'):  # nothing is seen at an infinite depth
        points = rays * depth[y, x, None] @ here[:3, :3].T + here[:3, 3]
        points = (points - there[:3, 3]) @ there[:3, :3]
        placed = points @ camera.matrix.T
        places = placed[:, :2] / placed[:, 2:]
        right = np.linalg.norm(places - judged.second, axis=1) <= RIGHT
        x, y = np.clip(np.rint(judged.second).astype(int), 0, np.array(SIZE) - 1).T
        right &= np.abs(points[:, 2] / depth_there[y, x] - 1) < HIDDEN
    return judged, right


def detect(detector: KeypointDetector, image: Image) -> Features:
    return detector.detect(image, max_keypoints=1000)


def train(pairs: list[tuple[Judged, NDArray[np.bool_]]], steps: int, seed: int) -> IONet:
    """Equation 5 on all matches, with a rate that falls to 0."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    net = IONet()
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    usable = [(judged.seen_by_io_net(), torch.from_numpy(right)) for judged, right in pairs]
    count = min(len(right) for _, right in usable)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        seen, labels = [], []
        for number in random.integers(len(usable), size=BATCH):
            inputs, right = usable[number]
            some = torch.from_numpy(random.permutation(len(right))[:count])
            seen.append(inputs[:, some])
            labels.append(torch.where(right[some], 1.0, -1.0))
        return torch.stack(seen), torch.stack(labels)

    with tqdm(total=steps, desc='IO-Net', unit='step') as bar:
        for _ in range(steps):
            seen, labels = batch()
            answer = net(seen)
            loss = (answer - labels).square().mean() / 2
            adam.zero_grad()
            loss.backward()
            adam.step()
            falling.step()
            right = ((answer > 0) == (labels > 0)).float().mean()
            bar.set_postfix_str(f'loss {loss.item():.3f}, right {right.item():.3f}', refresh=False)
            bar.update()
    # With the authors' momentum of .9 the averages are those of the last batch alone.
    norms = [layer for layer in net.modules() if isinstance(layer, torch.nn.BatchNorm1d)]
    for layer in norms:
        layer.reset_running_stats()
        layer.momentum = None
    with torch.no_grad():
        for _ in range(50):
            net(batch()[0])
    return net.eval()


@dataclass(frozen=True)
class Way:
    """Which matches are verified, and which of them are tried first."""

    name: str
    chosen: Callable[[Judged, Values], NDArray[np.bool_]]
    first: Callable[[Judged, Values], Values] | None = None  # those with the smallest values


WAYS = (
    Way('mutual', lambda each, score: each.mutual),
    Way('mutual, nearest first', lambda each, score: each.mutual, lambda each, s: each.distances),
    Way(
        'mutual, lowest ratio first', lambda each, score: each.mutual, lambda each, s: each.ratios
    ),
    Way('mutual, surest first', lambda each, score: each.mutual, lambda each, score: -score),
    Way('accepted', lambda each, score: each.mutual & (score > 0)),
    Way(
        'accepted, nearest first',
        lambda each, score: each.mutual & (score > 0),
        lambda each, score: each.distances,
    ),
    Way(
        'nearly accepted, nearest first',
        lambda each, score: each.mutual & (score > -0.5),
        lambda each, score: each.distances,
    ),
)


def judge(net: IONet, judged: Judged) -> Values:
    """What IO-Net says of each match: 1 for a right one, -1 for a wrong one."""
    with torch.no_grad():
        return np.asarray(net(judged.seen_by_io_net()[None])[0].numpy(), np.float32)


def verified(
    way: Way, judged: Judged, score: Values, seed: int, method: str, **options: Any
) -> tuple[NDArray[np.intp], NDArray[np.bool_], Matrix | None]:
    """The rows of the chosen matches in random order, which agree, and their geometry."""
    rows = np.random.default_rng(seed).permutation(np.flatnonzero(way.chosen(judged, score)))
    order = way.first(judged, score)[rows] if way.first is not None else None
    inliers, model = verify(
        judged.first[rows], judged.second[rows], method, distances=order, **options
    )
    return rows, inliers, model


def homographies(
    net: IONet, detector: KeypointDetector, folder: Path, seeds: int
) -> tuple[str, list[list[float]]]:
    """Pairs of planes: Cor-1, 3 and 5, the matches and those that are right, for each way."""
    rows: dict[str, list[list[float]]] = {way.name: [] for way in WAYS}
    size = tuple(CORNERS[2].astype(int) + 1)
    for sequence in tqdm(load_sequences(folder), folder.name, unit='sequence'):
        images = {number: read_image(path) for number, path in sequence.images.items()}
        found = {
            number: detect(detector, np.asarray(cv2.resize(image, size), np.uint8))
            for number, image in images.items()
        }
        for number, homography in sequence.homographies.items():
            truth = rescale(homography, size_of(images[1]), size_of(images[number]), size, 'exact')
            judged = Judged.of(found[1], found[number], size)
            score = judge(net, judged)
            right = np.linalg.norm(warp_points(judged.first, truth) - judged.second, axis=1)
            for way in WAYS:
                for seed in range(seeds):
                    chosen, _, model = verified(way, judged, score, seed, 'homography')
                    error = np.inf
                    if model is not None:
                        off = warp_points(CORNERS, model) - warp_points(CORNERS, truth)
                        error = float(np.linalg.norm(off, axis=1).mean())
                    rows[way.name].append(
                        [
                            *(error <= t for t in (1, 3, 5)),
                            len(chosen),
                            (right <= RIGHT)[chosen].sum(),
                        ]
                    )
    return 'Cor-1  Cor-3  Cor-5  matches  right', [np.mean(rows[w.name], 0).tolist() for w in WAYS]


def camera_motions(
    net: IONet, detector: KeypointDetector, folder: Path, gap: int, seeds: int
) -> tuple[str, list[list[float]]]:
    """Median errors in degrees, the area under their curve, matches, those near true lines."""
    path = load_camera_path(folder)
    rows: dict[str, list[list[float]]] = {way.name: [] for way in WAYS}
    options = {
        'threshold': EPIPOLAR, 'intrinsics': path.camera.matrix, 'undistort': path.camera.undistort
    }  # fmt: skip
    for start in tqdm(choose_pairs(path, [gap])[gap], f'{path.name}, {gap} apart', unit='pair'):
        images = [read_image(path.images[frame]) for frame in (start, start + gap)]
        first, second = (detect(detector, image) for image in images)
        judged = Judged.of(first, second, size_of(images[0]))
        score, truth = judge(net, judged), path.motion(start, start + gap)
        a, b = path.camera.rays(judged.first), path.camera.rays(judged.second)
        x, y, z = truth[:3, 3]
        essential = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]]) @ truth[:3, :3]
        flat = [path.camera.undistort(points) for points in (judged.first, judged.second)]
        off = distances_to(essential, 'essential', flat[0], flat[1], path.camera.matrix)
        for way in WAYS:
            for seed in range(seeds):
                chosen, inliers, model = verified(way, judged, score, seed, 'essential', **options)
                errors = (FAILED, FAILED)
                if model is not None and inliers.sum() > 5:
                    agreeing = inliers.astype(np.uint8)[:, None]
                    _, rotation, direction, *_ = cv2.recoverPose(
                        model, a[chosen], b[chosen], np.eye(3), distanceThresh=1e9, mask=agreeing
                    )
                    errors = motion_errors(np.asarray(rotation), np.ravel(direction), truth)
                rows[way.name].append([*errors, len(chosen), (off <= EPIPOLAR)[chosen].sum()])
    results = []
    for way in WAYS:
        table = np.array(rows[way.name])
        curve = area_under_curve(table[:, :2].max(axis=1), WITHIN)
        medians = np.median(table[:, :2], axis=0)
        results.append([*medians, curve, *table[:, 2:].mean(axis=0)])
    return 'rotation  direction  AUC@5  matches  right', results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--data', type=Path, nargs='+', required=True, help='photographs')
    parser.add_argument('--hpatches', type=Path, help='sequences in HPatches layout')
    parser.add_argument('--motion', type=Path, nargs='*', default=[], help='camera paths')
    parser.add_argument('--gaps', type=int, nargs='+', default=[10, 20], help='frames apart')
    parser.add_argument('--model', default='small')
    parser.add_argument('--precision', default='auto')
    parser.add_argument('--pairs', type=int, default=1000, help='to train on')
    parser.add_argument('--steps', type=int, default=2000)
    parser.add_argument('--seeds', type=int, default=5, help='estimates of a pair')
    parser.add_argument('--seed', type=int, default=0, help='of the training')
    args = parser.parse_args()
    detector = KeypointDetector.load(args.model, precision=args.precision)
    random = np.random.default_rng(args.seed)
    photographs = find_photographs(args.data)
    sources = planes(detector, photographs, random), motions(detector, photographs, random)
    pairs = [
        next(sources[number % 2]) for number in tqdm(range(args.pairs), 'matches', unit='pair')
    ]
    net = train([(each, right) for each, right in pairs if right.any()], args.steps, args.seed)

    tasks: list[tuple[str, str, list[list[float]]]] = []
    if args.hpatches:
        tasks.append((args.hpatches.name, *homographies(net, detector, args.hpatches, args.seeds)))
    for folder in args.motion:
        for gap in args.gaps:
            found = camera_motions(net, detector, folder, gap, args.seeds)
            tasks.append((f'{folder.name}, {gap} frames apart', *found))
    for name, titles, rows in tasks:
        print(f'\n{name}\n{"":30}{titles}')
        for way, row in zip(WAYS, rows, strict=True):
            print(f'{way.name:30}' + '  '.join(f'{value:.3f}' for value in row))


if __name__ == '__main__':
    main()
