"""Losses of distinct, precise points: owners of places, partners, gradients."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kp2d_core.architecture import Architecture
from kp2d_core.networks import KeyPointNet, Maps
from kp2d_core.networks.geometry import cell_centres, normalise, refine
from kp2d_core.training.config import LossConfig
from kp2d_core.training.model import TrainingModel
from kp2d_core.training.place_losses import (
    Lesson,
    distinct,
    flatten_view,
    invert,
    kept_points,
    nearest_point,
    one_of_each_block,
    place_loss,
)
from kp2d_core.training.recipes import find_recipe, load_config, override

CELL = 4
ROWS, COLUMNS = 8, 10
CONFIG = LossConfig(kind='places', location_score_power=1, match_distance=3.0, relaxation=5.0)


def maps(shift: float = 0.0, scores: float = 0.5, seed: int = 0) -> Maps:
    """A point in the middle of every cell, moved by `shift` px to the right."""
    random = torch.Generator().manual_seed(seed)
    points = (
        cell_centres(ROWS, COLUMNS, CELL, torch.zeros(1))
        + torch.tensor([shift, 0.0])[None, :, None, None]
    )
    plane = torch.full((1, 1, ROWS, COLUMNS), scores)
    descriptors = torch.randn(1, 16, ROWS, COLUMNS, generator=random)
    return Maps(plane, points, descriptors, points, torch.ones_like(plane))


def test_the_nearest_point_is_that_of_a_cell_around():
    points = maps(0.5).keypoints.flatten(2).transpose(1, 2)
    places = torch.tensor([[[9.0, 13.0], [5.6, 1.5]]])
    distances, chosen = nearest_point(places, points, (ROWS, COLUMNS), CELL)
    every = torch.cdist(places, points)
    torch.testing.assert_close(distances, every.min(-1).values)
    assert torch.equal(chosen, every.argmin(-1))


@pytest.mark.parametrize(('shift', 'owned'), [(0.0, True), (2.9, True), (3.1, False)])
def test_a_cell_owns_what_lies_in_it_or_just_beyond(shift, owned):
    view = flatten_view(maps(shift), CELL, margin=1.0)
    assert view.owned.sum() == ((ROWS - 2) * (COLUMNS - 2) if owned else 0)


def two_at_one_place() -> Maps:
    """Cells (3, 4) and (3, 5) find points 2 px apart, the second with the higher score."""
    found = maps()
    points, scores = found.keypoints.clone(), found.scores.clone()
    points[0, 0, 3, 4] += 1.0
    points[0, 0, 3, 5] -= 1.0
    scores[0, 0, 3, 4], scores[0, 0, 3, 5] = 0.8, 0.9
    return found._replace(keypoints=points, scores=scores)


def test_of_two_points_at_one_place_the_better_is_distinct():
    view = flatten_view(two_at_one_place(), CELL, margin=1.0)
    first = 3 * COLUMNS + 4
    expected = torch.ones(1, ROWS * COLUMNS, dtype=torch.bool)
    expected[0, first] = False
    assert torch.equal(distinct(view, (ROWS, COLUMNS), 3.0), expected)


def test_only_the_best_distinct_points_are_kept():
    view = flatten_view(two_at_one_place(), CELL, margin=1.0)
    best = replace(CONFIG, kept_share=1 / (ROWS * COLUMNS))
    kept = kept_points(view, (ROWS, COLUMNS), best)[0]
    assert (kept > 0).all(-1).nonzero().tolist() == [[3 * COLUMNS + 5]]


def test_a_score_earns_nothing_where_the_partner_is_not_kept():
    """In equal views all points are found again among all, but few among the best tenth."""
    torch.manual_seed(0)
    view = maps()
    scores = torch.rand(view.scores.shape, generator=torch.Generator().manual_seed(1))
    view = view._replace(scores=scores)
    among = {
        share: place_loss(view, view, torch.eye(3)[None], CELL, replace(CONFIG, kept_share=share))[
            1
        ]['found']
        for share in (1.0, 0.1)
    }
    assert among[1.0] == 1.0
    assert 0 < among[0.1] < 0.5


def test_descriptors_of_better_points_weigh_more():
    """Only the best points have their own descriptors: the more they weigh, the lower the loss."""
    view = maps()
    scores = torch.full_like(view.scores, 0.01)
    scores[0, 0, 2:4, 4:6] = 0.99  # a block
    descriptors = torch.ones_like(view.descriptors)
    descriptors[0, ::2, 2:4, 4:6] = -1
    view = view._replace(scores=scores, descriptors=descriptors / 4)
    losses = [
        place_loss(
            view, view, torch.eye(3)[None], CELL, replace(CONFIG, descriptor_score_power=power)
        )[1]['descriptor']
        for power in (0.0, 1.0)
    ]
    assert losses[1] < 0.7 * losses[0]


def test_one_of_each_block_is_the_best_or_a_random_one():
    torch.manual_seed(0)
    scores = torch.zeros(1, ROWS * COLUMNS)
    scores[0, 11] = 1.0  # row 1, column 1: in the first block
    picks = [int(one_of_each_block(scores, (ROWS, COLUMNS))[0, 0]) for _ in range(200)]
    assert set(picks) == {0, 1, 10, 11}
    assert 100 < picks.count(11) < 150  # half of the time, and a quarter of the other half


def test_the_way_back_is_in_front_of_the_camera():
    forth = torch.tensor([[[1.1, 0.1, 3], [-0.1, 0.9, 2], [1e-3, 5e-4, -1]]]) * -1
    back = invert(forth, (32, 40))
    middle = torch.tensor([19.5, 15.5, 1.0])
    there = forth[0] @ middle
    again = back[0] @ (there / there[2])
    assert again[2] > 0
    torch.testing.assert_close(again / again[2], middle, atol=1e-3, rtol=0)


def test_the_same_view_twice_is_a_perfect_location_and_recall():
    total, parts = place_loss(maps(), maps(), torch.eye(3)[None], CELL, CONFIG)
    assert torch.isfinite(total)
    assert parts['location'] < 1e-5 and parts['agreement'] < 1e-9
    assert parts['recall'] == 1 and parts['found'] == 1


def test_points_that_miss_each_other_are_not_found():
    moved = torch.eye(3)[None].clone()
    moved[0, 0, 2] = 2.0  # half a cell: points that stick to the grid are 2 px off
    _, parts = place_loss(maps(), maps(), moved, CELL, CONFIG)
    assert parts['location'] == pytest.approx(2.0, abs=1e-3)
    assert parts['found'] == 0


def test_scores_and_sigma_settle_at_what_is_true():
    """A high score costs nothing if all points are found; sigma is best at the true error."""
    good = place_loss(maps(scores=0.99), maps(scores=0.99), torch.eye(3)[None], CELL, CONFIG)[1]
    bad = place_loss(maps(scores=0.01), maps(scores=0.01), torch.eye(3)[None], CELL, CONFIG)[1]
    assert good['score'] < 0.05 < 4 < bad['score']
    shifted = torch.eye(3)[None].clone()
    shifted[0, 0, 2] = 1.0
    costs = []
    for sigma in (0.1, 0.5, 3.0):  # the error of 1 px is of two points, two axes: 0.5 each
        view = maps()._replace(sigma=torch.full((1, 1, ROWS, COLUMNS), sigma))
        costs.append(place_loss(view, view, shifted, CELL, CONFIG)[1]['sigma'])
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
    eye = torch.eye(3)[None]
    learnt = [place_loss(view, view, eye, CELL, CONFIG, lesson)[1] for lesson in (same, other)]
    assert learnt[0]['teaching'] == pytest.approx(0, abs=1e-5) and learnt[1]['teaching'] > 0.5
    assert 'teaching' not in place_loss(view, view, eye, CELL, CONFIG)[1]


def test_a_teacher_is_neither_trained_nor_saved(photographs):
    config = override(
        load_config(find_recipe('fast')),
        ['loss.teacher=small', 'pairs.width=64', 'pairs.height=64'],
    )
    model = TrainingModel(config)
    assert not any('teacher' in name for name in model.state_dict())
    images = torch.from_numpy(np.stack([photographs['coffee'][:64, :64]] * 2))
    before = {k: v.clone() for k, v in model.teachers[0].state_dict().items()}
    loss, parts = model.train()(images, torch.eye(3)[None], 0)
    loss.backward()
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
    loss, _ = place_loss(found, found, torch.eye(3)[None], CELL, CONFIG)
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
