"""The odometry node: from keypoints to the pose of the robot, its path and a map."""
