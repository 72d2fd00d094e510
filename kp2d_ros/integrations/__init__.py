"""Publish our features in the messages of other SLAM systems."""
