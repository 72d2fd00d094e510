"""Track points through a video: python video.py FILM.mp4, or 0 for a webcam"""

import sys

import cv2

from kp2d_core import KeypointDetector, Tracker

source = sys.argv[1]
video = cv2.VideoCapture(int(source) if source.isdecimal() else source)
detector = KeypointDetector.load()
tracker = Tracker(verification='fundamental', threshold=2.0)

while True:
    read, frame = video.read()
    if not read:
        break
    rgb = cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
    features = detector.detect(rgb, scales=(1,), max_keypoints=500)
    tracks = tracker.update(features)
    seen_before = tracks.ages > 0
    print(f'{len(features)} points, {seen_before.sum()} seen before, oldest {tracks.ages.max()}')
