"""The networks, in torch."""

from kp2d_core.networks.io_net import IONet
from kp2d_core.networks.keypoint_net import KeyPointNet, Maps

__all__ = ['IONet', 'KeyPointNet', 'Maps']
