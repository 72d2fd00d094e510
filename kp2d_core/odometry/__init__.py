"""Visual odometry: from features to the motion of the camera and a sparse map."""

from kp2d_core.odometry.frames import Rig
from kp2d_core.odometry.odometry import Estimate, Odometry, State
from kp2d_core.odometry.settings import Settings

__all__ = ['Estimate', 'Odometry', 'Rig', 'Settings', 'State']
