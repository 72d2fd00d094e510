"""Reconstruct a scene from photographs: python colmap.py FOLDER"""

import sys
from pathlib import Path

import pycolmap

from kp2d_core import KeypointDetector
from kp2d_core.exchange import Named, choose_pairs, match_all, names_below, save_colmap
from kp2d_core.images import find_images

root, names = names_below(find_images([Path(sys.argv[1])]))
detector = KeypointDetector.load()
features = detector.detect([root / name for name in names], max_keypoints=2000)
images = Named(root, names, features)
verified = save_colmap(Path('scene.db'), images, match_all(images, choose_pairs(names)))
print(f'{verified} pairs verified')

for number, model in pycolmap.incremental_mapping('scene.db', root, '.').items():
    print(f'model {number}: {model.num_reg_images()} of {len(names)} images')
