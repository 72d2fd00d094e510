"""KeyPointNet in a training loop of your own: descriptors that stand changes of light."""

import torch
from skimage.data import astronaut, coffee
from torch.nn.functional import cross_entropy

from kp2d_core.checkpoint import save_checkpoint
from kp2d_core.networks import KeyPointNet
from kp2d_core.networks.geometry import normalise, sample_descriptors

images = torch.stack([torch.from_numpy(image[:128, :160]) for image in (astronaut(), coffee())])
network = KeyPointNet.from_pretrained('small')  # in eval mode: dropout would drown so small a step
optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
for step in range(8):
    dark = (images * 0.1).to(torch.uint8)
    bright, dim = network(normalise(images)), network(normalise(dark))
    points = bright.keypoints.flatten(2).transpose(1, 2).detach()  # (B, N, 2), pixels
    first, second = (sample_descriptors(m.descriptors, points, (128, 160)) for m in (bright, dim))
    similarity = first @ second.transpose(1, 2) / 0.07  # (B, N, N): each should know its own
    loss = cross_entropy(similarity.flatten(0, 1), torch.arange(points.shape[1]).repeat(2))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f'step {step}: {loss.item():.3f}')
save_checkpoint('mine.safetensors', network.to_checkpoint(notes='trained in an example'))
