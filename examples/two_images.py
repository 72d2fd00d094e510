"""Match two images and draw the matches: python two_images.py A.jpg B.jpg"""

import sys

from kp2d_core import KeypointDetector, match
from kp2d_core.images import read_image
from kp2d_core.visualize import draw_matches, write_image

paths = sys.argv[1:3]
detector = KeypointDetector.load()
first, second = detector.detect(paths, max_keypoints=1000)
matches = match(first, second, verification='fundamental')

images = [read_image(path) for path in paths]
write_image('matches.png', draw_matches(*images, first, second, matches))
print(first, second, sep='\n')
print(f'{matches.inliers.sum()} of {len(matches)} matches agree, drawn in matches.png')
