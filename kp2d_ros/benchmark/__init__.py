"""`kp2d bench node`: the node measured in processes of its own."""
