"""Pose graph: distribute the correction of loops over the trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kp2d_core.odometry.geometry import Matrix
from kp2d_core.odometry.similarity import Similarity

MOST = 300  # nodes in the equations; with more, every 2nd, 3rd, ... and the others follow


@dataclass(frozen=True)
class Edge:
    """The relative pose of two cameras."""

    first: int
    second: int
    motion: Similarity  # of points: second camera from first
    weight: float = 1.0


def relax(
    nodes: list[Similarity], edges: list[Edge], with_scale: bool = True, steps: int = 20
) -> list[Similarity]:
    """Optimise the nodes (cameras from the world, in temporal order); the first one is fixed.

    Consecutive nodes keep their relative poses as far as possible; the edges are added to that.
    """
    ends = {edge.first for edge in edges} | {edge.second for edge in edges}
    stride = max(1, -(-len(nodes) // MOST))
    kept = sorted({0, len(nodes) - 1} | set(range(0, len(nodes), stride)) | ends)
    place = {node: i for i, node in enumerate(kept)}
    chain = [
        Edge(i, i + 1, nodes[b] @ nodes[a].inverse()) for i, (a, b) in enumerate(pairwise(kept))
    ]
    loops = [Edge(place[e.first], place[e.second], e.motion, e.weight) for e in edges]
    solved = _solve([nodes[i] for i in kept], chain + loops, with_scale, steps)
    return _followers(nodes, kept, solved)


def _solve(
    nodes: list[Similarity], edges: list[Edge], with_scale: bool, steps: int
) -> list[Similarity]:
    damping, cost = 1e-6, _cost(nodes, edges)
    for _ in range(steps):
        normal, right = _normal(nodes, edges, with_scale)
        for _ in range(5):
            damped = normal + damping * np.diag(np.diag(normal))
            moves = np.zeros((len(nodes), 7))
            moves[1:] = np.linalg.solve(damped, right).reshape(-1, 7)
            tried = [node.moved(move) for node, move in zip(nodes, moves, strict=True)]
            new_cost = _cost(tried, edges)
            if new_cost < cost:
                break
            damping *= 10
        else:
            break
        gain, cost, nodes = cost - new_cost, new_cost, tried
        damping = max(damping / 10, 1e-9)
        if gain < 1e-6 * cost:
            break
    return nodes


def _normal(nodes: list[Similarity], edges: list[Edge], with_scale: bool) -> tuple[Matrix, Matrix]:
    """The normal equations of all nodes but the first."""
    count = len(nodes)
    normal, right = np.zeros((count, 7, count, 7)), np.zeros((count, 7))
    for edge in edges:
        i, j = edge.first, edge.second
        off = (edge.motion @ nodes[i] @ nodes[j].inverse()).log()
        ahead = edge.motion.adjoint()
        normal[i, :, i] += edge.weight * ahead.T @ ahead
        normal[j, :, j] += edge.weight * np.eye(7)
        normal[i, :, j] -= edge.weight * ahead.T
        normal[j, :, i] -= edge.weight * ahead
        right[i] -= edge.weight * ahead.T @ off
        right[j] += edge.weight * off
    if not with_scale:
        normal[:, 6], normal[:, :, :, 6], right[:, 6] = 0, 0, 0
        normal[np.arange(count), 6, np.arange(count), 6] = 1
    size = 7 * (count - 1)
    return normal[1:, :, 1:].reshape(size, size), right[1:].ravel()


def _cost(nodes: list[Similarity], edges: list[Edge]) -> float:
    return sum(
        edge.weight
        * float(
            ((edge.motion @ nodes[edge.first] @ nodes[edge.second].inverse()).log() ** 2).sum()
        )
        for edge in edges
    )


def _followers(
    nodes: list[Similarity], kept: list[int], solved: list[Similarity]
) -> list[Similarity]:
    """Move the nodes in between like their solved neighbours, weighted by distance."""
    result = []
    for number, node in enumerate(nodes):
        after = int(np.searchsorted(kept, number))
        if kept[after] == number:
            result.append(solved[after])
            continue
        a, b = kept[after - 1], kept[after]
        share = (number - a) / (b - a)
        ways = [node @ nodes[k].inverse() @ solved[s] for k, s in ((a, after - 1), (b, after))]
        between = (ways[1] @ ways[0].inverse()).log()
        result.append(ways[0].moved(share * between))
    return result
