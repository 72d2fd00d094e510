"""KeyPointNet in a training loop of your own: make descriptors robust to changes of light."""

import torch
from skimage.data import astronaut, coffee
from torch.nn.functional import cross_entropy

from kp2d_core.checkpoint import save_checkpoint
from kp2d_core.networks import KeyPointNet
from kp2d_core.networks.geometry import normalise

images = torch.stack([torch.from_numpy(image[:128, :160]) for image in (astronaut(), coffee())])
dark = (images * 0.1).to(torch.uint8)
network = KeyPointNet.from_pretrained('small')  # evaluation mode: no dropout in so short a run
optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
for step in range(8):
    bright, dim = network(normalise(images)), network(normalise(dark))
    points = bright.keypoints.flatten(2).transpose(1, 2).detach()  # (B, N, 2), in pixels
    similarity = network.describe(bright, points) @ network.describe(dim, points).transpose(1, 2)
    own = torch.arange(points.shape[1]).repeat(len(images))  # each point should match itself
    loss = cross_entropy(similarity.flatten(0, 1) / 0.07, own)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f'step {step}: {loss.item():.3f}')
save_checkpoint('mine.safetensors', network.to_checkpoint(notes='trained in an example'))
