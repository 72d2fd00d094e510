"""Losses: small cases computed by hand, gradients, and no NaN for any input."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from models import grid_of_points, shift
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kp2d_core.architecture import Architecture
from kp2d_core.geometry import warp_tensor
from kp2d_core.networks import IONet, KeyPointNet, Maps
from kp2d_core.training import losses
from kp2d_core.training.association import associate
from kp2d_core.training.config import LossConfig, NetworkConfig, TrainingConfig
from kp2d_core.training.model import TrainingModel, halves
from kp2d_core.training.optimizer import make_optimizers
from kp2d_core.training.recipes import find_recipe, load_config, override

IDENTITY = torch.eye(3)[None]


def test_warp_divides_by_depth_and_sends_what_is_behind_far_away():
    matrix = torch.tensor([[[2.0, 0, 1], [0, 2, 0], [0, 0.5, 1]]])
    points = torch.tensor([[[3.0, 2.0], [3.0, -4.0]]])
    warped = warp_tensor(points, matrix)
    assert warped[0, 0].tolist() == [3.5, 2.0]  # (7, 4) / 2
    assert (warped[0, 1] < -1000).all()  # depth -1


def test_masked_mean_is_a_mean_of_means_and_takes_images_without_a_point():
    values = torch.tensor([[1.0, 3.0, 100.0], [7.0, math.inf, 5.0], [9.0, 9.0, 9.0]])
    valid = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    assert losses.masked_mean(values, valid).item() == pytest.approx((2 + 7 + 0) / 3)
    weights = torch.tensor([[3.0, 1.0, 1.0]]).expand(3, 3)
    assert losses.masked_mean(values, valid, weights).item() == pytest.approx((1.5 + 7) / 3)


def test_location_loss_can_weigh_by_score():
    apart = torch.tensor([[1.0, 3.0]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    weights = torch.tensor([[0.9, 0.3]]) ** 2
    expected = (0.81 * 1 + 0.09 * 3) / 0.9
    assert losses.location_loss(apart, valid, weights).item() == pytest.approx(expected)


def test_exclusion_is_a_square_and_knows_the_invisible():
    warped = torch.tensor([[[0.0, 0.0], [7.0, 7.0], [9.0, 0.0], [50.0, 50.0]]])
    visible = torch.tensor([[True, True, True, False]])
    barred = losses.excluded(warped, visible, relaxation=8)
    assert barred[0, 0].tolist() == [True, True, False, True]
    assert barred[0, 2].tolist() == [False, True, True, True]


# Three anchors; similarity to the three positives. Point 1 is excluded for point 0.
SIMILARITY = torch.tensor([[[0.9, 0.95, 0.5], [0.2, 0.4, 0.8], [0.0, 0.1, 1.0]]])
VISIBLE = torch.ones(1, 3, dtype=torch.bool)
BARRED = torch.eye(3, dtype=torch.bool)[None] | torch.tensor(
    [[[0, 1, 0], [1, 0, 0], [0, 0, 0]]], dtype=torch.bool
)


def test_triplet_takes_the_hardest_negative_that_is_not_excluded():
    def apart(similarity: float) -> float:
        return math.sqrt(2 - 2 * similarity)

    expected = [
        max(0, apart(0.9) - apart(0.5) + 0.2),  # 0.95 is excluded
        max(0, apart(0.4) - apart(0.8) + 0.2),
        max(0, 0.001 - apart(0.1) + 0.2),
    ]
    loss = losses.triplet_loss(SIMILARITY, VISIBLE, BARRED, 0.2)
    assert loss.item() == pytest.approx(sum(expected) / 3, abs=1e-4)
    assert losses.recall(SIMILARITY, VISIBLE, BARRED).item() == pytest.approx(2 / 3)


def test_infonce_is_a_symmetric_cross_entropy():
    def entropy(wanted: float, *others: float) -> float:
        return math.log(sum(math.exp(s / 0.1) for s in (wanted, *others))) - wanted / 0.1

    forward = [entropy(0.9, 0.5), entropy(0.4, 0.8), entropy(1.0, 0.0, 0.1)]
    backward = [entropy(0.9, 0.0), entropy(0.4, 0.1), entropy(1.0, 0.5, 0.8)]
    loss = losses.infonce_loss(SIMILARITY, VISIBLE, BARRED, 0.1)
    assert loss.item() == pytest.approx((sum(forward) + sum(backward)) / 6, rel=1e-4)


def test_infonce_ignores_the_invisible():
    visible = torch.tensor([[True, True, False]])
    barred = BARRED | ~visible[:, None]
    with_it = losses.infonce_loss(SIMILARITY, visible, barred, 0.1)
    without = losses.infonce_loss(SIMILARITY[:, :2, :2], visible[:, :2], BARRED[:, :2, :2], 0.1)
    assert with_it.item() == pytest.approx(without.item(), abs=1e-5)


def test_score_loss_rewards_points_nearer_than_the_average():
    source = torch.tensor([[0.8, 0.6]], requires_grad=True)
    target = torch.tensor([[0.4, 0.2]], requires_grad=True)
    valid = torch.ones(1, 2, dtype=torch.bool)
    pairing = losses.Association(
        torch.zeros(1, 2, 2), valid, torch.tensor([[0, 1]]), torch.tensor([[1.0, 3.0]]), valid
    )
    loss = losses.score_map_loss(source, target, target.detach(), pairing)
    # The average distance is 2: (0.6 * (1 - 2) + 0.4 * (3 - 2)) / 2, and a squared difference.
    assert loss.item() == pytest.approx(-0.1 + 0.16, abs=1e-6)
    loss.backward()
    assert target.grad.tolist()[0] == pytest.approx([-0.25, 0.25])  # of the first term


def test_score_loss_compares_the_scores_of_pairs_and_the_authors_code_the_score_map():
    source = torch.tensor([[0.8, 0.6, 0.5, 0.9]], requires_grad=True)
    # The third one is paired with a point of the border ring, the last one has no pair.
    target = torch.tensor([[0.4, 0.2, 0.0, 0.7]], requires_grad=True)
    visible = torch.ones(1, 4, dtype=torch.bool)
    apart = torch.tensor([[1.0, 3.0, 2.0, 50.0]], requires_grad=True)
    pairing = losses.Association(
        torch.zeros(1, 4, 2), visible, torch.tensor([[0, 1, 2, 3]]), apart, apart < 4
    )
    merit = (0.6 * (1 - 2) + 0.4 * (3 - 2) + 0.25 * 0) / 3
    loss = losses.score_loss(source, target, pairing)
    assert loss.item() == pytest.approx(merit + (0.16 + 0.16) / 2, abs=1e-6)
    loss.backward()
    assert source.grad[0, 3] == 0 and target.grad[0, 3] == 0  # what has no pair keeps its score
    assert apart.grad[0, 0] > 0 > apart.grad[0, 1]  # equation 4 does not detach the distance
    sampled = torch.tensor([[0.3, 0.3, 0.3, 0.3]])
    of_the_map = losses.score_map_loss(source, target, sampled, pairing)
    squares = (0.25 + 0.09 + 0.04 + 0.36) / 4
    assert of_the_map.item() == pytest.approx(merit + squares, abs=1e-6)


def test_partners_earn_the_same_score_and_distances_stay_as_they_are():
    source = torch.tensor([[0.8, 0.6, 0.5, 0.9]], requires_grad=True)
    # The third one is in the border ring, the last one has no partner.
    target = torch.tensor([[0.4, 0.2, 0.0, 0.7]], requires_grad=True)
    apart = torch.tensor([[1.0, 2.0, 1.0, 50.0]], requires_grad=True)
    visible = torch.ones(1, 4, dtype=torch.bool)
    pairing = losses.Association(
        torch.zeros(1, 4, 2), visible, torch.tensor([[0, 1, 2, 3]]), apart, apart < 4
    )
    loss = losses.partner_score_loss(source, target, pairing, 4.0)
    # The average distance is (1 + 2 + 1 + 4) / 4 = 2.
    merit = (0.6 * (1 - 2) + 0.4 * (2 - 2) + 0.25 * (1 - 2) + 0.9 * (4 - 2)) / 4
    assert loss.item() == pytest.approx(merit + 0.16, abs=1e-6)
    loss.backward()
    assert apart.grad is None and target.grad[0, 3] == 0
    assert source.grad[0, 3].item() == pytest.approx(2 / 4)  # it is to lose its score
    assert target.grad[0, :2].tolist() == pytest.approx([-0.5 / 4 - 0.4, -0.4])


def test_reliability_rewards_points_whose_descriptor_stands_out():
    scores = torch.tensor([[0.5, 0.5, 0.5]], requires_grad=True)
    similarity = SIMILARITY.clone().requires_grad_()
    loss = losses.reliability_loss(scores, scores.detach(), similarity, VISIBLE, BARRED, 0.1)
    loss.backward()
    # Point 1 is mistaken for point 2 (0.4 against 0.8), the others are not.
    assert scores.grad[0, 1] > 0 > scores.grad[0, 0]
    assert scores.grad[0, 2] < scores.grad[0, 0]
    assert similarity.grad is None


def test_scores_are_sampled_between_cell_centres():
    scores = torch.arange(12.0).reshape(1, 1, 3, 4)
    points = torch.tensor([[[3.5, 3.5], [11.5, 3.5], [7.5, 11.5], [-5.0, 0.0]]])
    assert losses.sample_scores(scores, points)[0].tolist() == pytest.approx([0, 1, 4.5, 0])


def test_lowest_scored_skips_the_border_ring():
    scores = torch.zeros(1, 1, 4, 5)
    scores[0, 0, 1:3, 1:4] = torch.tensor([[0.6, 0.1, 0.5], [0.4, 0.3, 0.2]])
    keypoints = grid_of_points().transpose(1, 2).reshape(1, 2, 4, 5)
    chosen = losses.lowest_scored(Maps(scores, keypoints, torch.zeros(1, 2, 8, 10), scores), 2)
    assert chosen[0].tolist() == [[19.5, 11.5], [27.5, 19.5]]
    everything = losses.lowest_scored(
        Maps(scores, keypoints, torch.zeros(1, 2, 8, 10), scores), 300
    )
    assert everything.shape == (1, 6, 2)


class Answers(IONet):
    """Returns given answers and records its inputs."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, pairs: Tensor) -> Tensor:
        self.asked = pairs
        return self.answer


def test_io_loss_asks_of_the_nearest_descriptors_and_labels_by_distance():
    scores = torch.arange(16.0).reshape(1, 1, 4, 4) / 16
    keypoints = grid_of_points(4, 4).transpose(1, 2).reshape(1, 2, 4, 4)
    source = Maps(scores, keypoints, torch.randn(1, 64, 16, 16), scores)
    answer = torch.tensor([[0.5, 1.0, -1.0, 1.0]])
    io_net = Answers(answer)
    loss = losses.io_loss(io_net, source, source, IDENTITY, 300, 4.0)
    # Every point matches itself: all four labels are +1.
    assert loss.item() == pytest.approx((0.25 + 0 + 4 + 0) / 2 / 4)
    # Pixel 11.5 of 0..31 and 19.5 are -0.258 and 0.258 in [-1, 1].
    assert io_net.asked[0, :2, 0].tolist() == pytest.approx([-0.2581, -0.2581], abs=1e-3)
    assert torch.equal(io_net.asked[0, :2], io_net.asked[0, 2:4])
    assert io_net.asked[0, 4].max() < 0.01
    moved = losses.io_loss(io_net, source, source, shift(6, 0), 300, 4.0)
    assert moved.item() == 0  # no inlier: nothing to learn from


def small_model(**loss: object) -> tuple[TrainingModel, Tensor]:
    torch.manual_seed(0)
    config = TrainingConfig(
        network=NetworkConfig('small', 4, 16, dropout=0.0),
        loss=replace(LossConfig(io_points=30), **loss),
    )
    images = torch.randint(0, 200, (2, 64, 80, 3), dtype=torch.uint8)
    noise = torch.randint(0, 50, (2, 64, 80, 3), dtype=torch.uint8)
    return TrainingModel(config), torch.cat([images, images + noise])


def test_io_loss_alone_moves_descriptors_and_locations():
    """Like variant V3, without descriptor loss, and without location loss."""
    model, images = small_model(descriptor='none', location=0.0, score=0.0)
    loss, parts = model(images, IDENTITY.expand(2, 3, 3), 0)
    assert set(parts) == {'location', 'io', 'total', 'recall'}
    loss.backward()
    for layer in (model.network.convFbb, model.network.convPb):
        assert layer.weight.grad.abs().max() > 0
    assert model.network.convDb.weight.grad is None or not model.network.convDb.weight.grad.any()


def test_descriptor_loss_moves_descriptors_and_not_locations():
    for kind in ('triplet', 'infonce'):
        model, images = small_model(descriptor=kind, location=0.0, score=0.0, io=0.0)
        matrices = shift(3, 2).expand(2, 3, 3)
        model(images, matrices, 0)[0].backward()
        assert model.network.convFbb.weight.grad.abs().max() > 0
        grad = model.network.convPb.weight.grad
        assert grad is None or not grad.any()


def test_location_loss_pulls_points_together():
    source = grid_of_points().requires_grad_()
    found = associate(source, grid_of_points(), shift(2, 0), (4, 5), 4)
    losses.location_loss(found.distance, found.valid).backward()
    assert source.grad[0, 6].tolist() == pytest.approx([1 / 6, 0], abs=1e-4)  # go left


def test_the_weights_of_the_location_loss_do_not_teach_scores():
    for power in (0.0, 2.0):
        model, images = small_model(
            location=1.0, location_score_power=power, score=0.0, io=0.0, descriptor='none'
        )
        loss, parts = model(images, shift(3, 2).expand(2, 3, 3), 0)
        loss.backward()
        grad = model.network.convDb.weight.grad
        assert grad is None or not grad.any()
    plain = small_model(location=1.0, score=0.0, io=0.0, descriptor='none')[0]
    _, unweighted = plain(images, shift(3, 2).expand(2, 3, 3), 0)
    assert parts['location'] != unweighted['location']


@pytest.mark.parametrize(
    ('changes', 'idle'),
    [
        ({}, set()),
        ({'io': 0.0}, {'io_net'}),
        ({'score': 0.0}, {'convDa', 'convDb'}),
        ({'location': 0.0, 'io': 0.0, 'score_of': 'partner'}, {'io_net', 'convPa', 'convPb'}),
        (
            {'descriptor': 'none', 'io': 0.0},
            {'io_net', 'convFa', 'convFb', 'convFaa', 'convFbb'},
        ),
    ],
)
def test_what_no_loss_reaches_gets_no_gradient(changes, idle):
    model, images = small_model(**changes)
    model(images, shift(3, 2).expand(2, 3, 3), 0)[0].backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert {name.removeprefix('network.').split('.')[0] for name in without} == idle


def test_infonce_as_a_start_gives_way_to_the_triplet():
    config = LossConfig(descriptor='triplet', infonce_steps=10, io=0.0, score=0.0)
    model, images = small_model()
    source, target = halves(model.maps(images))
    matrices = shift(3, 2).expand(2, 3, 3)

    def descriptor(step: int) -> float:
        return losses.total_loss(source, target, matrices, model.io_net, config, step)[1][
            'descriptor'
        ].item()

    assert descriptor(9) > 1 > descriptor(10)  # log of many points; at most about the margin


STRANGE = {
    'black': torch.zeros(4, 64, 80, 3, dtype=torch.uint8),
    'identical': torch.full((4, 64, 80, 3), 127, dtype=torch.uint8),
    'noise': torch.randint(0, 256, (4, 64, 80, 3), dtype=torch.uint8),
}
MATRICES = {
    'identity': torch.eye(3),
    'nothing in common': shift(1000, 0)[0],
    'behind the camera': torch.tensor([[1.0, 0, 0], [0, 1, 0], [-0.1, 0, -1]]),
    'one point': torch.diag(torch.tensor([0.01, 0.01, 1.0])),
}


@pytest.mark.parametrize('matrix', MATRICES)
@pytest.mark.parametrize('images', STRANGE)
@pytest.mark.parametrize('descriptor', ['triplet', 'infonce'])
def test_never_nan(images, matrix, descriptor):
    model, _ = small_model(descriptor=descriptor, location_score_power=2.0, reliability=0.5)
    loss, parts = model(STRANGE[images], MATRICES[matrix].expand(2, 3, 3), 0)
    loss.backward()
    assert all(torch.isfinite(value) for value in parts.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


def test_reliability_teaches_scores_of_small_cells_only():
    """A score learns from its descriptor, which does not learn to please the score."""
    config = override(
        load_config(find_recipe('small')),
        ['network.width=4', 'network.descriptor_size=16', 'compute.precision=float32']
        + [f'loss.{name}=0' for name in ('location', 'score', 'sigma', 'descriptor_weight')]
        + ['loss.reliability=1'],
    )
    model = TrainingModel(config)
    images = torch.randint(0, 256, (4, 64, 80, 3), dtype=torch.uint8)
    loss, parts = model(images, shift(3, 2).expand(2, 3, 3), 0)
    loss.backward()
    assert parts['reliability'] == pytest.approx(loss.item())
    moved = {name for name, p in model.network.named_parameters() if p.grad is not None}
    assert 'convDb.weight' in moved and 'convFbb.weight' not in moved


def test_descriptor_distance_has_a_finite_gradient_everywhere():
    similarity = torch.tensor([1.0, 1.0 + 1e-6, -1.0, 0.0], requires_grad=True)
    losses.descriptor_distance(similarity).sum().backward()
    assert torch.isfinite(similarity.grad).all()


def test_a_batch_costs_the_mean_of_its_parts():
    """Processes that share a batch must average to the result of one process."""
    torch.manual_seed(1)
    network = KeyPointNet(Architecture('small', 4, 16), dropout=0.0).eval()
    io_net = IONet().eval()
    images = torch.rand(8, 3, 64, 80)
    matrices = torch.stack([shift(3 * i, -2 * i)[0] for i in range(4)])
    config = LossConfig(io_points=30)
    maps = network(images)
    source, target = halves(maps)
    whole = losses.total_loss(source, target, matrices, io_net, config, 0)[1]
    parts = [
        losses.total_loss(
            Maps(*(v[i : i + 2] for v in source)),
            Maps(*(v[i : i + 2] for v in target)),
            matrices[i : i + 2],
            io_net,
            config,
            0,
        )[1]
        for i in (0, 2)
    ]
    for name, value in whole.items():
        assert value.item() == pytest.approx(
            (parts[0][name].item() + parts[1][name].item()) / 2, abs=1e-5
        ), name


class Copies(TorchDispatchMode):
    """Records each copy from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            given = args[-1] if function is torch.ops.aten.copy_.default else args[0]
            if isinstance(given, Tensor) and given.device != result.device:
                self.found.append(str(function))
        return result


@pytest.mark.parametrize('recipe', ['v0', 'v4', 'half', 'small'])
def test_a_step_never_waits_for_the_device(recipe):
    """On a device without values, where reading is an error and every copy is recorded."""
    config = override(
        load_config(find_recipe(recipe)),
        ['network.width=4', 'network.descriptor_size=16', 'compute.precision=float32'],
    )
    model = TrainingModel(config).to('meta')
    optimizers = make_optimizers(model, config.optimizer)
    images = torch.empty(4, 64, 80, 3, dtype=torch.uint8, device='meta')
    matrices = torch.empty(2, 3, 3, device='meta')
    with Copies() as copies:
        loss, _ = model(images, matrices, 0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 40.0)
        for optimizer in optimizers:
            optimizer.step()
    assert copies.found == []
    with pytest.raises((RuntimeError, NotImplementedError)):
        loss.item()
