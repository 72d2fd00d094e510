"""Find keypoints in the images of a ROS bag, without ROS: python bag.py DRIVE.mcap [/TOPIC]"""

import sys
from pathlib import Path

from kp2d_core import KeypointDetector
from kp2d_core.bags import decode_image, image_connections, open_bag

path = Path(sys.argv[1])
topic = sys.argv[2] if len(sys.argv) > 2 else None  # None: all topics with images
detector = KeypointDetector.load()

with open_bag(path) as reader:
    connections = image_connections(reader, path, topic)
    for connection, nanoseconds, data in reader.messages(connections):
        image = decode_image(reader, connection, data)
        features = detector.detect(image, max_keypoints=500)
        print(f'{nanoseconds / 1e9:.3f} {connection.topic}: {features}')
