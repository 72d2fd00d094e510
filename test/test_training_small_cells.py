"""Losses with cells of 4 px: refinement, descriptors of some cells, sigma, a teacher."""

import numpy as np
import pytest
import torch

from kp2d_core.architecture import Architecture
from kp2d_core.networks import IONet, KeyPointNet, Maps
from kp2d_core.networks.geometry import cell_centres, normalise, refine
from kp2d_core.training.config import LossConfig
from kp2d_core.training.losses import Lesson, one_of_each_block, total_loss
from kp2d_core.training.model import TrainingModel
from kp2d_core.training.recipes import find_recipe, load_config, override

CELL = 4
ROWS, COLUMNS = 8, 10
CONFIG = LossConfig(
    descriptor='infonce', score_of='partner', match_distance=3.0, relaxation=5.0, io=0.0
)


def maps(seed: int = 0) -> Maps:
    """A point in the middle of every cell."""
    random = torch.Generator().manual_seed(seed)
    points = cell_centres(ROWS, COLUMNS, CELL, torch.zeros(1))
    plane = torch.full((1, 1, ROWS, COLUMNS), 0.5)
    descriptors = torch.randn(1, 16, ROWS, COLUMNS, generator=random)
    return Maps(plane, points, descriptors, torch.ones_like(plane))


def loss(source, target, shift=0.0, lesson=None):
    """The loss of two views that are `shift` px apart."""
    moved = torch.eye(3)[None].clone()
    moved[0, 0, 2] = shift
    return total_loss(source, target, moved, IONet(), CONFIG, 0, CELL, lesson)


def test_a_block_of_cells_gives_its_best_or_any_of_them():
    torch.manual_seed(0)
    scores = torch.zeros(1, ROWS * COLUMNS)
    scores[0, 11] = 1  # in the second row and column: of the first block
    picks = [int(one_of_each_block(scores, (ROWS, COLUMNS))[0, 0]) for _ in range(200)]
    assert set(picks) == {0, 1, 10, 11}
    assert 100 < picks.count(11) < 150  # half of the time, and a quarter of the other half


def test_the_same_view_twice_is_a_perfect_location_and_recall():
    total, parts = loss(maps(), maps())
    assert torch.isfinite(total)
    assert parts['location'] < 1e-5 and parts['recall'] == 1


def test_points_that_stick_to_the_grid_are_half_a_cell_off():
    _, parts = loss(maps(), maps(), shift=2.0)
    assert parts['location'] == pytest.approx(2.0, abs=1e-3)


def test_sigma_is_best_at_the_true_error():
    """The error of 1 px is of two points and two axes: 0.5 each."""
    costs = []
    for sigma in (0.1, 0.5, 3.0):
        view = maps()._replace(sigma=torch.full((1, 1, ROWS, COLUMNS), sigma))
        costs.append(loss(view, view, shift=1.0)[1]['sigma'])
    assert costs[1] < costs[0] and costs[1] < costs[2]


def test_refinement_follows_the_image_and_not_the_grid():
    """From any cell, a point ends on the same peak, between pixels."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(40.0), indexing='ij')
    saliency = (-((x - 17.3) ** 2 + (y - 12.6) ** 2))[None, None]
    begins = torch.tensor([[[15.5, 11.5], [18.5, 14.0], [17.0, 12.0]]])
    ends = refine(saliency, begins)
    torch.testing.assert_close(
        ends, torch.tensor([[[17.3, 12.6]]]).expand(1, 3, 2), atol=0.05, rtol=0
    )


def test_a_pupil_that_agrees_with_its_teacher_has_nothing_to_learn():
    torch.manual_seed(0)
    view = maps()._replace(descriptors=torch.randn(1, 8, ROWS, COLUMNS))
    # The same similarities in a space of other dimensions, turned.
    turned = torch.linalg.qr(torch.randn(16, 8))[0]
    long = torch.einsum('td,bdhw->bthw', turned, view.descriptors)
    same = Lesson(long, long, pinned=False)
    other = Lesson(torch.randn_like(long), torch.randn_like(long), pinned=False)
    learnt = [loss(view, view, lesson=lesson)[1] for lesson in (same, other)]
    assert learnt[0]['teaching'] == pytest.approx(0, abs=1e-5) and learnt[1]['teaching'] > 0.5
    assert 'teaching' not in loss(view, view)[1]


def test_a_teacher_is_neither_trained_nor_saved(photographs):
    settings = ['loss.teacher=small', 'pairs.width=64', 'pairs.height=64']
    model = TrainingModel(override(load_config(find_recipe('fast')), settings))
    assert not any('teacher' in name for name in model.state_dict())
    images = torch.from_numpy(np.stack([photographs['coffee'][:64, :64]] * 2))
    before = {k: v.clone() for k, v in model.teachers[0].state_dict().items()}
    total, parts = model.train()(images, torch.eye(3)[None], 0)
    total.backward()
    assert parts['teaching'] > 0 and model.network.convFbb.weight.grad.abs().sum() > 0
    assert all(torch.equal(v, before[k]) for k, v in model.teachers[0].state_dict().items())
    assert all(p.grad is None for p in model.teachers[0].parameters())


def test_every_layer_learns(photographs):
    torch.manual_seed(0)
    network = KeyPointNet(
        Architecture('tiny', 8, 16, cell=4, context=True, saliency=4), dropout=0.0
    )
    image = torch.from_numpy(photographs['astronaut'][100:196, 100:228].copy())[None]
    found = network(normalise(image))
    total, _ = loss(found, network(normalise(image.flip(0))))
    total.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
