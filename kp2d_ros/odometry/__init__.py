"""The odometry node: estimates the pose of the robot, its path and a map from keypoints."""
