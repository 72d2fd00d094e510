"""Initialise a map: from the first frames of a moving camera, or from one frame of a rig.

Two views of a plane have two equally good solutions. In an almost planar scene, the two solutions
are hard to distinguish. Therefore every solution is extended to more of the collected frames,
adjusted there, and compared by its remaining error.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from kp2d_core.odometry.adjustment import Problem, adjust, residuals, robust_cost
from kp2d_core.odometry.frames import Frame, Map, Rig, sight_of
from kp2d_core.odometry.geometry import (
    Bools,
    Ints,
    Matrix,
    log_rotation,
    parallax,
    project,
    rigid,
    triangulate,
)
from kp2d_core.odometry.pose import refine
from kp2d_core.odometry.search import match_all, match_epipolar
from kp2d_core.odometry.settings import Settings

HYPOTHESES = 5  # solutions to compare, at most
JUDGES = 10  # frames to compare them on, at most; spread evenly over the collected frames
ENOUGH = 300  # points to compare them with, at most
FAR = 20.0  # depth of a point that a solution cannot triangulate, in median depths
FURTHER = 1.25  # try again once the points have moved this many times as far as at the last try
# Two solutions are the same if rotation and direction differ by less than this, in degrees.
SAME_TURN, SAME_WAY = 1.0, 12.0


@dataclass
class Hypothesis:
    """A solution: poses of the judging frames, and 3D points of features of the first frame."""

    poses: Matrix  # (J, 4, 4) world to camera; the first is the identity
    points: Matrix  # (P, 3)
    rows: Ints  # (P,) indices of the features in the first frame
    cost: float = np.inf  # mean cost per observation


class Starter:
    """Collects frames of one camera until a map can be initialised."""

    def __init__(self, rig: Rig, settings: Settings, random: np.random.Generator) -> None:
        self.rig, self.settings, self.random = rig, settings, random
        self.frames: list[Frame] = []
        self._matches: list[tuple[Ints, Ints]] = []  # rows of the first frame, rows of this one
        self._tried = 0.0  # image motion at the last try, px

    def update(self, frame: Frame) -> list[Frame] | None:
        """Add a frame; return the frames of the new map (`world`) once it can be initialised."""
        if self.frames:
            self._matches.append(self._match(self.frames[0], frame))
        else:
            self._matches.append((np.arange(len(frame)), np.arange(len(frame))))
        self.frames.append(frame)
        if len(self.frames) < 3:
            return None
        here, there = self._matches[-1]
        first = self.frames[0]
        shift = np.linalg.norm(first.seen[here] - frame.seen[there], axis=1) * self.rig.focal
        enough = self.settings.start_points
        if len(here) < max(1.5 * enough, 0.2 * len(self._matches[1][0])):
            self._restart()
            return None
        moved_by = float(np.median(shift))
        if moved_by >= max(self.settings.start_shift, FURTHER * self._tried):
            self._tried = moved_by
            best = self._solve()
            if best is not None:
                return self._make_map(best)
        if len(self.frames) >= self.settings.start_frames:
            self._restart()
        return None

    def _match(self, first: Frame, frame: Frame) -> tuple[Ints, Ints]:
        return match_all(first.features.descriptors, frame.features.descriptors, self.settings)

    def _restart(self) -> None:
        """Restart from the middle of the collected frames."""
        kept = self.frames[(len(self.frames) + 1) // 2 :]
        self.frames, self._matches, self._tried = [], [], 0.0
        for frame in kept:
            self._matches.append(
                self._match(self.frames[0], frame)
                if self.frames
                else (np.arange(len(frame)), np.arange(len(frame)))
            )
            self.frames.append(frame)

    def _judges(self) -> Ints:
        """Return the frames to compare hypotheses on: the first, the last, and some between."""
        count = min(JUDGES, len(self.frames))
        return np.unique(np.linspace(0, len(self.frames) - 1, count).round().astype(np.int64))

    def _solve(self) -> Hypothesis | None:
        """Return the solution that is clearly better than all others; None if there is none."""
        here, there = self._matches[-1]
        a, b = self.frames[0].seen[here], self.frames[-1].seen[there]
        motions = self._motions(a, b)
        settings, focal = self.settings, self.rig.focal
        candidates = []
        for motion in motions:
            points = triangulate(np.eye(4), motion, a, b)
            good = _well_seen(points, motion, a, b, 2 * settings.outlier / focal)
            candidates.append((int(good.sum()), motion, points, good))
        candidates.sort(key=lambda candidate: -candidate[0])
        if not candidates or candidates[0][0] < settings.start_points:
            return None
        candidates = [c for c in candidates[:HYPOTHESES] if c[0] >= 0.5 * candidates[0][0]]
        # Compare all solutions with the same points: each fits its own inliers best.
        common = np.any([good for _, _, _, good in candidates], axis=0)
        solutions = []
        for _, motion, points, good in candidates:
            poses = np.array([np.eye(4), motion])
            far = FAR * np.median(points[good, 2])
            tried = np.where(good[:, None], points, far * np.column_stack([a, np.ones(len(a))]))
            judged = self._carried(_thinned(Hypothesis(poses, tried[common], here[common])))
            solutions.append((judged, Hypothesis(poses, points[good], here[good])))
        best = self._clear([judged for judged, _ in solutions])
        if best is None:
            return None
        # Adjust the best solution again with all its points, from the poses found so far.
        whole = next(whole for judged, whole in solutions if judged is best)
        scale = np.linalg.norm(best.poses[-1][:3, 3]) / np.linalg.norm(whole.poses[-1][:3, 3])
        start = Hypothesis(best.poses[[0, -1]], whole.points * scale, whole.rows)
        return self._checked(self._carried(start))

    def _motions(self, a: Matrix, b: Matrix) -> list[Matrix]:
        """Estimate motions from the first frame to the last: essential matrix and homography."""
        order = self.random.permutation(len(a))
        a, b = a[order], b[order]
        unit = 1 / self.rig.focal
        found: list[Matrix] = []
        try:
            essential, _ = cv2.findEssentialMat(
                a, b, np.eye(3), method=cv2.USAC_ACCURATE, prob=0.9999, threshold=unit,
                maxIters=5000,
            )  # fmt: skip
            if essential is not None and essential.shape == (3, 3):
                first, second, way = cv2.decomposeEssentialMat(essential)
                found += [rigid(turn, s * way) for turn in (first, second) for s in (1, -1)]
            plane, _ = cv2.findHomography(a, b, cv2.USAC_MAGSAC, 2 * unit, maxIters=2000)
            if plane is not None:
                _, turns, ways, _ = cv2.decomposeHomographyMat(plane, np.eye(3))
                for turn, way in zip(turns, ways, strict=True):
                    length = np.linalg.norm(way)
                    if length > 1e-4:
                        found += [rigid(turn, s * way / length) for s in (1, -1)]
        except cv2.error:  # degenerate points
            pass
        return found

    def _carried(self, solution: Hypothesis) -> Hypothesis:
        """Extend a solution to all judging frames and adjust it."""
        chosen, robust = self._judges(), self.settings.robust
        first, last = solution.poses
        poses = [first]
        observations = []
        place = np.full(len(self.frames[0]), -1)
        place[solution.rows] = np.arange(len(solution.rows))
        for order, number in enumerate(chosen):
            here, there = self._matches[number]
            known = place[here] >= 0
            frame, rows, numbers = self.frames[number], there[known], place[here[known]]
            observations.append((np.full(len(rows), order), numbers, frame.seen[rows]))
            if order == 0:
                continue
            guess = last.copy() if order == len(chosen) - 1 else poses[-1]
            sight = sight_of(self.rig, frame, rows, solution.points[numbers])
            poses.append(refine(sight, guess, steps=15, threshold=3 * robust))
        frame_index, point_index, seen = (
            np.concatenate(part) for part in zip(*observations, strict=True)
        )
        fixed = np.zeros(len(poses), bool)
        fixed[0] = True
        problem = Problem(
            np.array(poses), solution.points, frame_index, point_index, seen,
            np.full(len(seen), self.rig.focal), fixed,
        )  # fmt: skip
        adjust(problem, steps=8, threshold=robust)
        off = residuals(problem, problem.poses, problem.points)
        cost = robust_cost(off, robust) / len(off)
        return Hypothesis(problem.poses, problem.points, solution.rows, cost)

    def _clear(self, solutions: list[Hypothesis]) -> Hypothesis | None:
        """Return the best solution if all others are clearly worse, or the same motion."""
        settings = self.settings
        best = min(solutions, key=lambda solution: solution.cost)
        for other in solutions:
            if not _same(best, other) and other.cost < settings.start_margin * best.cost:
                return None
        return best

    def _checked(self, best: Hypothesis) -> Hypothesis | None:
        """Remove bad points; return None if too few are left or their parallax is too small."""
        settings = self.settings
        here, there = self._matches[-1]
        place = np.full(len(self.frames[0]), -1)
        place[here] = there
        a = self.frames[0].seen[best.rows]
        b = self.frames[-1].seen[place[best.rows]]
        good = _well_seen(best.points, best.poses[-1], a, b, settings.outlier / self.rig.focal)
        if good.sum() < settings.start_points or good.mean() < 0.6:
            return None
        angles = parallax(np.eye(4), best.poses[-1], best.points[good])
        if np.degrees(np.median(angles)) < settings.start_parallax:
            return None
        return Hypothesis(best.poses, best.points[good], best.rows[good], best.cost)

    def _make_map(self, best: Hypothesis) -> list[Frame]:
        """Create the map and its points; set the poses and the observations of all frames."""
        frames, chosen = self.frames, self._judges()
        scale = float(np.median(best.points[:, 2]))
        positions = best.points / scale
        self.world = Map(self.rig)
        numbers = self.world.add_points(
            positions, frames[0].features.descriptors[best.rows], keyframe=frames[0].index
        )
        place = np.full(len(frames[0]), -1)
        place[best.rows] = numbers
        limit = self.settings.outlier
        for number, frame in enumerate(frames):
            here, there = self._matches[number]
            known = place[here] >= 0
            rows, points = there[known], place[here[known]]
            order = int(np.searchsorted(chosen, number))
            frame.pose = best.poses[order].copy()
            frame.pose[:3, 3] /= scale
            sight = self.world.sight(frame, rows, points)
            if chosen[order] != number:
                frame.pose = refine(sight, frame.pose, threshold=self.settings.robust)
            flat, depth = project(frame.pose, sight.points)
            off = np.linalg.norm(flat - sight.seen, axis=1) * sight.weight
            good = (depth > 0) & (off < limit)
            frame.points[rows[good]] = points[good]
        return frames


def start_from_rig(rig: Rig, frame: Frame, settings: Settings) -> Map | None:
    """Initialise a metric map from one frame of several cameras; None if it has too few points."""
    frame.pose = np.eye(4)
    world = Map(rig)
    if triangulate_rig(world, frame, settings) < settings.start_points:
        return None
    return world


def triangulate_rig(world: Map, frame: Frame, settings: Settings) -> int:
    """Triangulate points that two cameras of the rig observe; return their number."""
    made = 0
    focal = world.rig.focal
    free = [
        np.flatnonzero((frame.camera == c) & (frame.points < 0))
        for c in range(len(world.rig.cameras))
    ]
    descriptors = frame.features.descriptors
    for other in range(1, len(world.rig.cameras)):
        left, right = (world.rig.mounts[camera] @ frame.pose for camera in (0, other))
        own = free[0][frame.points[free[0]] < 0]
        i, j = match_epipolar(
            (descriptors[own], frame.seen[own], left),
            (descriptors[free[other]], frame.seen[free[other]], right),
            settings.epipolar / focal,
            settings,
        )
        i, j = own[i], free[other][j]
        points = triangulate(left, right, frame.seen[i], frame.seen[j])
        good = np.ones(len(points), bool)
        for view, rows in ((left, i), (right, j)):
            flat, depth = project(view, points)
            off = np.linalg.norm(flat - frame.seen[rows], axis=1) * frame.weight[rows]
            good &= (depth > 0) & (off < settings.outlier)
        good &= np.degrees(parallax(left, right, points)) > settings.min_parallax
        numbers = world.add_points(points[good], descriptors[i[good]], frame.index)
        frame.points[i[good]] = frame.points[j[good]] = numbers
        made += len(numbers)
    return made


def _well_seen(points: Matrix, motion: Matrix, a: Matrix, b: Matrix, limit: float) -> Bools:
    good = np.ones(len(points), bool)
    for pose, seen in ((np.eye(4), a), (motion, b)):
        flat, depth = project(pose, points)
        with np.errstate(invalid='ignore'):
            good &= (depth > 0) & (np.linalg.norm(flat - seen, axis=1) < limit)
    return good


def _thinned(solution: Hypothesis) -> Hypothesis:
    step = -(-len(solution.rows) // ENOUGH)
    return Hypothesis(solution.poses, solution.points[::step], solution.rows[::step])


def _same(first: Hypothesis, second: Hypothesis) -> bool:
    a, b = first.poses[-1], second.poses[-1]
    turn = np.degrees(np.linalg.norm(log_rotation(a[:3, :3] @ b[:3, :3].T)))
    ways = [pose[:3, :3].T @ pose[:3, 3] for pose in (a, b)]
    cosine = ways[0] @ ways[1] / max(np.linalg.norm(ways[0]) * np.linalg.norm(ways[1]), 1e-12)
    way = np.degrees(np.arccos(np.clip(cosine, -1, 1)))
    return bool(turn < SAME_TURN and way < SAME_WAY)
