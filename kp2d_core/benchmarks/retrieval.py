"""Recall of image retrieval: python -m kp2d_core.benchmarks.retrieval [RECORDING].

Compares the model's words with words learned from the recording. By default, the places lie along
a rendered ring of 100 m. The queries show the same places with the camera shifted, rotated and in
different light. A recording needs a ground truth: each query is one of its frames, and frames
close to it in time are ignored.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from kp2d_core.detector import KeypointDetector
from kp2d_core.features import Float
from kp2d_core.geometry import Matrix
from kp2d_core.odometry.geometry import exp_rotation, rigid
from kp2d_core.odometry.recordings import open_recording
from kp2d_core.odometry.retrieval import Retrieval
from kp2d_core.odometry.words import find_words
from kp2d_core.threads import one_blas_thread
from kp2d_core.views.photometric import PhotometricConfig, SharedColour, change_light
from kp2d_core.views.worlds import photographs, ring, ring_path, view_camera

STEP = 0.75  # m between places of the ring
ASIDE, TURN = 0.6, 20.0  # largest distance (m) and rotation (degrees) of a query from its place
LIGHT = PhotometricConfig(
    noise=(0.0, 0.04), brightness=(0.3, 1.2), contrast=(0.4, 1.2), gamma=2.0, shade=0.5
)
EVERY = 5  # frames of a recording between places
APART = 30  # frames between a query and a place of a recording, at least
WORST_TURN = 30.0  # degrees between a query and a place that answers it
COUNTS = (1, 4)  # places that retrieval names


@dataclass(frozen=True)
class Task:
    """Places, queries, and which places answer each query."""

    name: str
    places: list[Float]  # descriptors of each
    queries: list[Float]
    right: np.ndarray  # (queries, places) bool
    allowed: np.ndarray  # (queries, places) bool


def around_the_ring(detector: KeypointDetector, keypoints: int, count: int, seed: int) -> Task:
    random = np.random.default_rng(seed)
    scene, camera, way = ring(photographs()), view_camera(), ring_path(STEP, 100.0 - STEP)
    fine = ring_path(0.05, 99.0)
    poses = []
    for _ in range(count):
        turn = exp_rotation(np.radians(TURN) * random.uniform(-1, 1, 3) * (0.5, 1, 0.5))
        aside = random.uniform(-ASIDE, ASIDE, 3) * (1, 0.3, 1)
        poses.append(fine[random.integers(len(fine))] @ rigid(turn, aside))
    queries = np.array(poses)
    places = [
        _describe(detector, scene.view(camera, pose), keypoints) for pose in tqdm(way, 'places')
    ]
    asked = [
        _describe(
            detector,
            change_light(random, scene.view(camera, pose), SharedColour(np.eye(3)), LIGHT),
            keypoints,
        )
        for pose in tqdm(queries, 'queries')
    ]
    right = _near(queries, way, 1.5)
    return Task('ring, aside, in another light', places, asked, right, np.ones_like(right))


def of_a_recording(detector: KeypointDetector, name: str, keypoints: int, within: float) -> Task:
    recording = open_recording(name)
    if recording.truth is None:
        raise ValueError(f'{name} has no ground truth')
    frames = [
        _describe(detector, images[0], keypoints)
        for _, images in tqdm(recording.shots(), recording.name, recording.count)
    ]
    numbers = np.arange(len(frames))
    truth = recording.truth[: len(frames)]
    allowed = abs(numbers[:, None] - numbers[None, ::EVERY]) >= APART
    right = _near(truth, truth[::EVERY], within) & allowed
    asked = np.flatnonzero(right.any(axis=1))  # those that return to a place
    return Task(
        recording.name,
        frames[::EVERY],
        [frames[number] for number in asked],
        right[asked],
        allowed[asked],
    )


def _describe(detector: KeypointDetector, image: np.ndarray, keypoints: int) -> Float:
    return detector.detect(image, max_keypoints=keypoints).descriptors


def _near(queries: Matrix, places: Matrix, within: float) -> np.ndarray:
    off = np.linalg.norm(queries[:, None, :3, 3] - places[None, :, :3, 3], axis=2)
    alike = queries[:, :3, 2] @ places[:, :3, 2].T
    return (off < within) & (alike > np.cos(np.radians(WORST_TURN)))


def measure(
    task: Task, words: Float | None, lost_after: int | None = None
) -> tuple[list[float], float, int]:
    """Return the recall for each of COUNTS, ms of a query, and values of a vector.

    lost_after  places after which the first query comes, which learns words if there are none
    """
    retrieval = Retrieval(words)
    for number, descriptors in enumerate(task.places):
        retrieval.add(number, descriptors)
        if number + 1 in (lost_after, len(task.places)):
            retrieval.query(task.queries[0], 1)
    begun = time.process_time()
    hits = []
    for row, descriptors in enumerate(task.queries):
        found = retrieval.query(descriptors, len(task.places))
        named = [number for number, _ in found if task.allowed[row, number]]
        hits.append([task.right[row, named[:count]].any() for count in COUNTS])
    spent = 1e3 * (time.process_time() - begun) / len(hits)
    used = retrieval.words
    return np.mean(hits, axis=0).tolist(), spent, 0 if used is None else used.size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('recording', nargs='?', help='with a ground truth; see kp2d odometry')
    parser.add_argument('--model', default='small')
    parser.add_argument('--precision', default='auto')
    parser.add_argument('--keypoints', type=int, default=1000, help='of an image')
    parser.add_argument('--queries', type=int, default=200, help='around the ring')
    parser.add_argument('--within', type=float, default=0.05, help='m from a query to its place')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    detector = KeypointDetector.load(args.model, precision=args.precision)
    if args.recording:
        task = of_a_recording(detector, args.recording, args.keypoints, args.within)
    else:
        task = around_the_ring(detector, args.keypoints, args.queries, args.seed)
    shipped = find_words(detector.runtime.model, detector.runtime.digest)
    kinds: dict[str, tuple[Float | None, int | None]] = {
        'learned from 2 places': (None, 2),
        'learned from the places': (None, None),
    }
    if shipped is not None:
        kinds[f'of {detector.runtime.model}'] = (shipped.values, None)
    print(f'{task.name}: {len(task.queries)} queries, {len(task.places)} places')
    titles = [*(f'recall@{count}' for count in COUNTS), 'ms/query', 'kB/place']
    print(f'{"words":28}' + ''.join(f'{title:>10}' for title in titles))
    for name, (words, lost_after) in kinds.items():
        with one_blas_thread():  # as the odometry does
            recalls, spent, size = measure(task, words, lost_after)
        print(f'{name:28}' + ''.join(f'{each:10.3f}' for each in recalls)
              + f'{spent:10.2f}{size / 1e3:10.1f}')  # fmt: skip


if __name__ == '__main__':
    main()
