"""KeyPointNet and IO-Net, compared with the paper's tables and values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kp2d_core.architecture import VARIANTS, Architecture
from kp2d_core.networks import IONet, KeyPointNet
from kp2d_core.networks.geometry import (
    decode_locations,
    inner_cells,
    normalise,
    sample,
    sample_descriptors,
)


def parameter_count(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_v4_has_the_published_number_of_parameters():
    assert parameter_count(KeyPointNet(VARIANTS['v4'])) == 5_312_227


@pytest.mark.parametrize('variant', VARIANTS)
def test_state_dict_has_the_names_and_shapes_of_the_table(variant):
    architecture = VARIANTS[variant]
    state = KeyPointNet(architecture).state_dict()
    if variant.startswith('v'):
        assert len(state) == 84  # the authors'
    assert {k: tuple(v.shape) for k, v in state.items()} == architecture.parameter_shapes()


def test_authors_shapes_of_v4():
    shapes = VARIANTS['v4'].parameter_shapes()
    blocks = ('1a', '1b', '2a', '2b', '3a', '3b', '4a', '4b', 'Da', 'Pa', 'Fa', 'Fb', 'Faa')
    sequentials = [f'conv{name}' for name in blocks]
    assert len(sequentials) * 6 + 3 * 2 == len(shapes)
    assert all(f'{name}.1.num_batches_tracked' in shapes for name in sequentials)
    assert shapes['conv1a.0.weight'] == (32, 3, 3, 3)
    assert shapes['conv4b.0.weight'] == (256, 256, 3, 3)
    assert shapes['convDb.weight'] == (1, 256, 3, 3)
    assert shapes['convPb.weight'] == (2, 256, 3, 3)
    assert shapes['convFb.0.weight'] == (512, 256, 3, 3)
    assert shapes['convFbb.weight'] == (256, 256, 3, 3)
    assert shapes['convFbb.bias'] == (256,)


@pytest.mark.parametrize('size', [(240, 320), (480, 640)])
@pytest.mark.parametrize('variant', ['v0', 'v4', 'half', 'small'])
def test_output_sizes_at_the_papers_resolutions(variant, size):
    height, width = size
    architecture = VARIANTS[variant]
    with torch.no_grad():
        maps = KeyPointNet(architecture).eval()(torch.zeros(1, 3, height, width))
    stride, cell = 4 if architecture.upsample else 8, architecture.cell
    for name in ('scores', 'sigma'):
        assert getattr(maps, name).shape == (1, 1, height // cell, width // cell)
    assert maps.keypoints.shape == (1, 2, height // cell, width // cell)
    assert maps.descriptors.shape == (
        1, architecture.descriptor_size, height // stride, width // stride,
    )  # fmt: skip


def test_a_size_that_is_no_multiple_of_8_is_refused():
    with pytest.raises(ValueError, match='multiples of 8'):
        KeyPointNet(VARIANTS['half'])(torch.zeros(1, 3, 100, 104))


def test_scores_are_zero_in_the_border_ring_and_only_there():
    with torch.no_grad():
        scores = KeyPointNet(VARIANTS['half']).eval()(torch.rand(2, 3, 64, 80)).scores
    inner = inner_cells(*scores.shape[-2:], scores.device).expand_as(scores)
    assert (scores[~inner] == 0).all()
    assert (scores[inner] > 0).all()
    assert inner[0].sum() == 6 * 8


def test_dropout_is_where_the_paper_has_it():
    """After the second layer of each block and the first of each head: seven places."""
    network = KeyPointNet(VARIANTS['half'])
    calls = []
    network.dropout.register_forward_hook(
        lambda module, inputs, output: calls.append(output.shape)
    )
    network(torch.zeros(1, 3, 32, 32))
    assert [tuple(shape[1:]) for shape in calls] == [
        (16, 32, 32), (32, 16, 16), (64, 8, 8), (128, 4, 4),
        (128, 4, 4), (128, 4, 4), (128, 4, 4),
    ]  # fmt: skip
    assert network.dropout.p == 0.2


@pytest.mark.parametrize(
    ('cross', 'offset', 'expected'),
    [
        (True, (0.0, 0.0), (11.5, 19.5)),  # cell (row 2, column 1): its centre
        (True, (0.5, -0.5), (15.0, 16.0)),  # half of +-7 px
        (False, (0.5, -0.5), (13.25, 17.75)),  # half of +-3.5 px
        (True, (1.0, 1.0), (18.5, 26.5)),  # into the neighbouring cells
    ],
)
def test_locations_by_hand(cross, offset, expected):
    offsets = torch.zeros(1, 2, 4, 5)
    offsets[0, :, 2, 1] = torch.tensor(offset)
    decoded = decode_locations(offsets, Architecture(cross_border=cross).offset_range)
    assert decoded[0, :, 2, 1].tolist() == pytest.approx(expected)


def test_locations_stay_inside_the_image():
    decoded = decode_locations(torch.full((1, 2, 3, 4), 1.0), 7.0)
    assert decoded[0, 0].max() == 31 and decoded[0, 1].max() == 23
    decoded = decode_locations(torch.full((1, 2, 3, 4), -1.0), 7.0)
    assert decoded.min() == 0


def test_normalisation_multiplies_by_0_225():
    image = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 1, 1, 3)
    expected = [-0.1125, (0.2 - 0.5) * 0.225, 0.1125]
    assert normalise(image).flatten().tolist() == pytest.approx(expected)
    floats = image.permute(0, 3, 1, 2).float() / 255
    assert torch.allclose(normalise(floats), normalise(image))
    assert floats.max() == 1  # the caller's tensor is left alone


def test_sampling_pins_the_corner_texels_to_the_corner_pixels():
    """A 3x5 map over a 12x20 image: texel (row, column) lies at pixel (row 11/2, column 19/4)."""
    values = torch.arange(15.0).reshape(1, 1, 3, 5)
    points = torch.tensor([[[0, 0], [19, 11], [19 / 4, 11 / 2], [19 / 8, 0], [19, 11 / 4]]])
    sampled = sample(values, points, (12, 20))[0, :, 0]
    assert sampled.tolist() == pytest.approx([0, 14, 6, 0.5, 6.5], abs=1e-5)


def test_sampled_descriptors_are_unit_length_and_finite_where_the_map_is_zero():
    maps = torch.randn(1, 8, 4, 4)
    maps[..., 0, 0] = 0
    descriptors = sample_descriptors(maps, torch.tensor([[[0.0, 0.0], [15.0, 15.0]]]), (16, 16))
    assert descriptors[0, 0].tolist() == [0] * 8
    assert descriptors[0, 1].norm().item() == pytest.approx(1)


def test_leaky_relu_has_torchs_default_slope():
    network = KeyPointNet(VARIANTS['half']).eval()
    seen = []
    network.conv1a.register_forward_hook(lambda m, i, output: seen.append(output.clone()))
    network.conv1b.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        network(torch.randn(1, 3, 32, 32))
    before, after = seen
    assert torch.allclose(after, torch.where(before > 0, before, 0.01 * before))


def test_descriptor_head_has_no_activation_before_the_pixel_shuffle():
    network = KeyPointNet(VARIANTS['half']).eval()
    inputs = []
    network.convFaa.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    with torch.no_grad():
        network(torch.randn(1, 3, 64, 64))
    upsampled, skip = inputs[0].split(64, dim=1)
    assert upsampled.shape == skip.shape == (1, 64, 16, 16)
    assert upsampled.min() < -0.05 * upsampled.max()  # a LeakyReLU would have squashed it


def test_io_net_follows_table_6():
    network = IONet()
    assert network(torch.randn(2, 5, 300)).shape == (2, 300)
    per_block = 2 * (128 * 128 + 128 + 2 * 128)
    assert parameter_count(network) == 5 * 128 + 2 * 128 + 4 * per_block + 128 + 1
    assert network.enter[1].momentum == 0.9
    assert network.blocks[0].norm1.momentum == 0.1


def test_io_net_passes_gradients_to_its_inputs():
    pairs = torch.randn(1, 5, 50, requires_grad=True)
    IONet()(pairs).square().mean().backward()
    assert pairs.grad is not None and (pairs.grad.abs().sum(dim=(0, 2)) > 0).all()


def test_architecture_refuses_nonsense():
    with pytest.raises(ValueError, match='width'):
        Architecture(width=0)
    with pytest.raises(ValueError, match='unknown'):
        Architecture.from_dict({'depth': 3})
    assert math.isclose(Architecture(cross_border=False).offset_range, 3.5)
