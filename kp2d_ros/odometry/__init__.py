"""The odometry node: keypoints in; the way of the camera and a map out."""
