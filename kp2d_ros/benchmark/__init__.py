"""`kp2d bench node`: measures the node in separate processes."""
