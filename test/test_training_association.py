"""Pairs of points of two views, with cases computed by hand."""

from __future__ import annotations

import pytest
import torch
from models import grid_of_points, shift

from kp2d_core.training.association import DRIFT, FrontLayer, associate, nearest_point
from kp2d_core.training.losses import location_loss

IDENTITY = torch.eye(3)[None]


def test_association_finds_the_nearest_inside_and_within_the_threshold():
    source = grid_of_points()
    target = source + torch.tensor([1.0, 0.0])
    found = associate(source, target, shift(8, 0), (4, 5), threshold=4)
    inner = [r * 5 + c for r in (1, 2) for c in (1, 2, 3)]  # the border ring is out
    assert found.visible[0].nonzero()[:, 0].tolist() == inner
    # A cell to the right, and there 1 px off.
    assert found.nearest[0, inner].tolist() == [i + 1 for i in inner]
    assert found.distance[0, inner].tolist() == pytest.approx([1.0] * 6, abs=1e-4)
    assert location_loss(found.distance, found.valid).item() == pytest.approx(1, abs=1e-4)
    far = associate(source, target, shift(8, 0), (4, 5), threshold=0.5)
    assert not far.valid.any() and far.visible.any()


@pytest.mark.parametrize('cell', [4, 8])
def test_the_search_among_near_cells_finds_what_a_search_of_all_finds(cell):
    torch.manual_seed(2)
    rows, columns = 12, 15
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing='ij')
    centres = torch.stack([x, y], -1).reshape(1, -1, 2) * cell + (cell - 1) / 2
    target = centres + (cell - 1 + DRIFT) * (2 * torch.rand(3, rows * columns, 2) - 1)
    points = torch.rand(3, 400, 2) * torch.tensor([columns * cell + 20.0, rows * cell + 20.0]) - 10
    found = nearest_point(points, target, (rows, columns), 4.0, cell)
    distances = torch.cdist(points, target)
    best = distances.argmin(-1)
    near = distances.amin(-1) < 4
    assert 0.2 < near.float().mean() < 0.95
    assert torch.equal(found[near], best[near])


def test_points_in_front_are_paired_by_their_own_motion():
    source = grid_of_points()
    front = torch.zeros(1, 32, 40, dtype=torch.bool)
    before, after = front.clone(), front.clone()
    before[:, :, :20] = True  # two columns and a half of cells, which move right by one cell
    after[:, :, 8:28] = True
    layer = FrontLayer(before, after, shift(8, 0))
    found = associate(source, source, IDENTITY, (4, 5), 4, front=layer)
    row = slice(5, 10)
    assert found.warped[0, row, 0].tolist() == [11.5, 19.5, 19.5, 27.5, 35.5]
    # The third column was hidden by the objects that came; the ring of cells is never visible.
    assert found.visible[0, row].tolist() == [False, True, False, True, False]
    assert found.nearest[0, 6] == 7
