"""ROS 2 around kp2d_core: keypoints, matches and tracks from any camera, in standard messages."""
