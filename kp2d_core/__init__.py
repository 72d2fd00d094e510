"""Learned keypoints: detect, describe, match and track. Runs without rclpy and torch."""

try:
    import cv2  # noqa: F401
except ImportError as error:  # pip does not require it: a robot has its own OpenCV
    raise ImportError(
        'kp2d_core needs OpenCV: apt install python3-opencv, or pip install kp2d_ros[opencv]'
    ) from error

try:
    import safetensors  # noqa: F401
except ImportError as error:  # rosdep has no key for it
    raise ImportError('kp2d_core needs safetensors: pip install safetensors') from error

from kp2d_core.detector import KeypointDetector
from kp2d_core.errors import FileError
from kp2d_core.features import Features
from kp2d_core.matching import Matches, match
from kp2d_core.refinement import Refinement, refine_matches
from kp2d_core.tracking import Tracker, Tracks
from kp2d_core.version import __version__

__all__ = [
    'Features',
    'FileError',
    'KeypointDetector',
    'Matches',
    'Refinement',
    'Tracker',
    'Tracks',
    '__version__',
    'match',
    'refine_matches',
]
