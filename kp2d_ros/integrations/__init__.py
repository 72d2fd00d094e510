"""Our features in the messages of other SLAM systems."""
