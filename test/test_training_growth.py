"""A network grown to twice the width computes the same, and can learn more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import random_checkpoint

from kp2d_core.architecture import VARIANTS, Architecture
from kp2d_core.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from kp2d_core.networks import KeyPointNet, Maps
from kp2d_core.networks.geometry import normalise, sample_descriptors
from kp2d_core.training.model import grow, grows_into


def maps_of(checkpoint: Checkpoint, image: np.ndarray) -> Maps:
    network = KeyPointNet(checkpoint.architecture).eval()
    network.load_state_dict({k: torch.from_numpy(v) for k, v in checkpoint.weights.items()})
    with torch.no_grad():
        return network(normalise(torch.from_numpy(image)[None]))


def descriptors_of(maps: Maps, size: tuple[int, int]) -> torch.Tensor:
    return sample_descriptors(maps.descriptors, maps.keypoints.flatten(2).transpose(1, 2), size)


def grown(small: Checkpoint, wanted: Architecture) -> Checkpoint:
    return Checkpoint(wanted, grow(small, wanted))


@pytest.mark.parametrize('variant', ['half', 'v0'])
def test_the_wider_network_says_the_same(variant, photographs):
    """With upsampling and without, where the descriptor head has another shape."""
    image = np.ascontiguousarray(photographs['coffee'][:128, :160])
    if variant == 'half':
        small, wanted = load_checkpoint(find_checkpoint('half')), VARIANTS['v4']
    else:
        small = random_checkpoint('v0')
        wanted = replace(VARIANTS['v0'], width=64, descriptor_size=512)
    before, after = maps_of(small, image), maps_of(grown(small, wanted), image)
    assert (after.scores - before.scores).abs().max() < 1e-4
    assert (after.keypoints - before.keypoints).abs().max() < 1e-2
    first, second = descriptors_of(before, (128, 160)), descriptors_of(after, (128, 160))
    similar = first @ first.transpose(1, 2) - second @ second.transpose(1, 2)
    assert similar.abs().max() < 1e-3


def test_no_two_copies_are_alike_where_they_come_in():
    wide = grow(load_checkpoint(find_checkpoint('half')), VARIANTS['v4'])
    for name, value in wide.items():
        if value.ndim == 4 and value.shape[1] > 3 and name != 'convFaa.0.weight':
            first, second = np.split(value, 2, axis=1)
            assert np.abs(first - second).mean() > 0.2 * np.abs(value).mean(), name


def test_what_grows_into_what():
    assert grows_into(VARIANTS['half'], VARIANTS['v4'])
    assert not grows_into(VARIANTS['v4'], VARIANTS['v4'])  # it is one
    assert not grows_into(VARIANTS['v4'], VARIANTS['half'])
    assert not grows_into(VARIANTS['half'], VARIANTS['v1'])  # no upsampling
    assert not grows_into(VARIANTS['half'], replace(VARIANTS['v4'], descriptor_size=128))
    with pytest.raises(ValueError, match='does not grow'):
        grow(load_checkpoint(find_checkpoint('half')), VARIANTS['v1'])
