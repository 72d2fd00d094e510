"""Run the odometry on recordings with any features, and score the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from tqdm import tqdm

from kp2d_core.evaluation.methods import baseline
from kp2d_core.features import Features, Float, select
from kp2d_core.images import Image
from kp2d_core.odometry.geometry import Ints, Matrix
from kp2d_core.odometry.odometry import Odometry, State
from kp2d_core.odometry.recordings import Recording
from kp2d_core.odometry.settings import Settings
from kp2d_core.odometry.trajectory import Errors, errors

Extract = Callable[[Image], Features]

# Classical methods work best with a ratio test, which ours does not need, and with points spread
# over the image.
BASELINE_SETTINGS = {
    'sift': Settings(max_ratio=0.85, max_distance=0.9),
    'orb': Settings(max_ratio=0.95, max_distance=1.12),
}
SPREADS = (24.0, 16.0, 12.0, 8.0, 6.0, 4.0, 3.0)  # px between points, as many as still give enough


@dataclass(frozen=True)
class Method:
    """A feature extractor and the settings for it."""

    name: str
    extract: Extract
    settings: Settings
    words: Float | None = None  # visual words of the descriptors; None: they are learned


@dataclass
class Run:
    """One method over one recording. Rows are its frames; NaN where there is no pose."""

    method: str
    seed: int
    stamps: Matrix  # (N,)
    states: list[State]
    maps: Ints  # (N,) of the final poses; -1: none
    causal: Matrix  # (N, 4, 4) camera to world, as estimated when the frame arrived
    causal_maps: Ints  # (N,)
    final: Matrix  # (N, 4, 4) after everything was adjusted
    points: Matrix  # (M, 3) of the largest map
    keyframes: int
    loops: int
    wall_seconds: float | None  # of all frames, features included; None: they were there already
    feature_seconds: float  # processor's time, all frames
    odometry_seconds: float
    finish_seconds: float

    @property
    def largest(self) -> int:
        """The map with most frames."""
        known = self.maps[self.maps >= 0]
        return int(np.bincount(known).argmax()) if len(known) else -1

    def chosen(self) -> Ints:
        """Frames of the largest map."""
        return np.flatnonzero(self.maps == self.largest) if self.largest >= 0 else np.empty(0, int)


@dataclass(frozen=True)
class Score:
    """Errors of the largest map of a run."""

    final: Errors
    causal: Errors
    true_scale: float  # of the final poses against the truth
    length: float  # m of the true path of the frames that were compared
    worst: float  # m, largest error of a causal pose; each map is aligned separately


def baseline_method(name: str, count: int) -> Method:
    """Set up SIFT or ORB with the settings that suit them best."""
    if name not in BASELINE_SETTINGS:
        raise ValueError(
            f"there is no baseline '{name}' for the odometry: choose from "
            f'{", ".join(BASELINE_SETTINGS)}'
        )
    found = baseline(name, 4 * count)
    return Method(name, lambda image: spread(found(image), count), BASELINE_SETTINGS[name])


def remembering(method: Method) -> Method:
    """Return the method with a cache: features of an image are extracted once."""
    known: dict[bytes, Features] = {}

    def extract(image: Image) -> Features:
        key = blake2b(image.tobytes(), digest_size=16).digest()
        if key not in known:
            known[key] = method.extract(image)
        return known[key]

    return replace(method, extract=extract)


def spread(features: Features, count: int) -> Features:
    """Select the best `count` features with the largest possible spacing."""
    for radius in SPREADS:
        chosen = select(features, max_keypoints=count, nms_radius=radius)
        if len(chosen) >= count:
            return chosen
    return chosen


def run_all(
    recording: Recording,
    methods: Sequence[Method],
    *,
    seeds: int = 1,
    loops: bool = True,
    progress: bool = True,
) -> list[Run]:
    """Run every method with each seed; features are extracted once per method."""
    runs = []
    for method in methods:
        kept: list[tuple[float, list[Features]]] = []
        for seed in range(seeds):
            runs.append(_run(recording, method, seed, seeds, kept, loops, progress))
    return runs


def _run(
    recording: Recording,
    method: Method,
    seed: int,
    seeds: int,
    kept: list[tuple[float, list[Features]]],
    loops: bool,
    progress: bool,
) -> Run:
    odometry = Odometry(recording.rig, method.settings, words=method.words, seed=seed)
    estimates = []
    feature_seconds = odometry_seconds = wall_seconds = 0.0
    known = bool(kept)
    title = f'{method.name}, {recording.name}' + (f', seed {seed}' if seeds > 1 else '')
    hidden = None if progress else True
    with tqdm(total=recording.count, desc=title, unit='frame', disable=hidden) as bar:

        def follow(stamp: float, features: list[Features]) -> None:
            nonlocal odometry_seconds, wall_seconds
            begun, clock = time.process_time(), time.perf_counter()
            estimates.append(odometry.update(features, stamp))
            odometry_seconds += time.process_time() - begun
            wall_seconds += time.perf_counter() - clock
            bar.set_postfix_str(str(estimates[-1].state), refresh=False)
            bar.update()

        if known:
            for stamp, features in kept:
                follow(stamp, features)
        else:
            for stamp, images in recording.shots():
                begun, clock = time.process_time(), time.perf_counter()
                features = [method.extract(image) for image in images]
                feature_seconds += time.process_time() - begun
                wall_seconds += time.perf_counter() - clock
                if seeds > 1:
                    kept.append((stamp, features))
                follow(stamp, features)
    begun = time.process_time()
    closed = odometry.finish(loops)
    finish_seconds = time.process_time() - begun

    count = len(estimates)
    causal = np.full((count, 4, 4), np.nan)
    causal_maps = np.full(count, -1)
    for row, estimate in enumerate(estimates):
        if estimate.pose is not None:
            causal[row], causal_maps[row] = estimate.pose, estimate.map_number
    stamps = np.array([estimate.stamp for estimate in estimates])
    final, maps = np.full((count, 4, 4), np.nan), np.full(count, -1)
    for world in odometry.maps:
        times, poses = odometry.trajectory(world.number)
        rows = np.searchsorted(stamps, times)
        final[rows], maps[rows] = poses, world.number
    run = Run(
        method.name, seed, stamps, [e.state for e in estimates], maps, causal, causal_maps, final,
        np.empty((0, 3)), 0, closed, None if known else wall_seconds, feature_seconds,
        odometry_seconds, finish_seconds,
    )  # fmt: skip
    for world in odometry.maps:
        if world.number == run.largest:
            run.points, run.keyframes = odometry.points(world.number), len(world.keyframes)
    return run


def score(run: Run, recording: Recording) -> Score | None:
    """Score a run; None if there is no ground truth, or too few common frames."""
    if recording.truth is None:
        return None
    truth = recording.truth[: len(run.stamps)]
    known = np.isfinite(truth[:, 0, 0])
    rows = run.chosen()
    rows = rows[known[rows]]
    if len(rows) < 3:
        return None
    with_scale = not recording.stereo
    final = errors(run.final[rows], truth[rows], with_scale)
    scale = 1 / errors(run.final[rows], truth[rows]).scale
    told, worst = None, 0.0
    for number in np.unique(run.causal_maps[run.causal_maps >= 0]):
        mine = np.flatnonzero((run.causal_maps == number) & known)
        if len(mine) >= 3:
            found = errors(run.causal[mine], truth[mine], with_scale)
            worst = max(worst, found.worst)
            if told is None or found.frames > told.frames:
                told = found
    steps = np.diff(truth[rows][:, :3, 3], axis=0)
    length = max(float(np.linalg.norm(steps, axis=1).sum()), 1e-9)
    return None if told is None else Score(final, told, scale, length, worst)
