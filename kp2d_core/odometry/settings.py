"""Settings of the odometry. Pixels are those at the image centre of the first camera."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The defaults suit hand-held cameras and cars alike."""

    # Descriptors. A ratio test is for methods that need one, such as SIFT and ORB.
    max_distance: float = 1.0  # of unit descriptors that may be one point
    max_ratio: float | None = None  # of the nearest to the second nearest, where all are compared

    # Residuals count in standard deviations; a feature without a sigma has one of 1 px.
    outlier: float = 2.5  # beyond it an observation is dropped
    robust: float = 1.5  # beyond it an observation counts less and less

    # s from the first row of an image to the last; 0: a global shutter; None: is estimated
    readout: float | None = None

    # The start.
    start_shift: float = 16.0  # px that the points have moved in the median before it is tried
    start_points: int = 60  # that both views must see well
    start_parallax: float = 1.0  # degrees, of the median point
    start_frames: int = 24  # that are kept to judge by
    start_margin: float = 1.1  # times the best cost that any other solution must have

    # Tracking.
    wide_radius: float = 40.0  # px around the prediction at first
    narrow_radius: float = 8.0  # px once the pose is known roughly
    min_inliers: int = 25  # fewer and the frame counts as lost
    min_inlier_ratio: float = 0.4  # of the points that were matched
    min_found: float = 0.1  # of the points that should be seen
    local_keyframes: int = 12  # whose points are looked for
    leap_inliers: int = 100  # fewer, and the pose must be near the prediction:
    leap_degrees: float = 15.0
    leap_way: float = 0.3  # of the distance of the median point

    # Keyframes.
    keyframe_shift: float = 24.0  # px that the points have moved in the median since the last
    keyframe_way: float = 0.08  # of the distance of near points (a fifth is nearer)
    keyframe_kept: float = 0.8  # share of its points that are still seen; below, a new one
    keyframe_interval: int = 20  # frames after which there is a new one if anything moved
    min_parallax: float = 0.6  # degrees, of a new point
    epipolar: float = 2.0  # px off the line that a new point may be seen
    window: int = 10  # keyframes that the adjustment moves
    anchors: int = 8  # keyframes that it holds
    steps: int = 5  # of the adjustment
    max_keyframes: int = 1000  # of all maps, about 0.3 MB each; see thinning.py for which go

    # After a loss.
    relocalise_inliers: int = 40
    relocalise_found: float = 0.2  # of the points that should be seen
    relocalise_candidates: int = 4  # keyframes that are looked at in each frame
    patience: int = 5  # frames of a loss after which a new map may begin
