"""Compare our decoder with the real cv_bridge, if a Python of this machine has it.

That is this Python with ROS sourced, the system's with python3-cv-bridge of Debian, or the one in
KP2D_CV_BRIDGE_PYTHON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = ('rgb8', 'bgr8', 'rgba8', 'bgra8', 'mono8', 'mono16', 'bayer_rggb8', 'bayer_grbg8')


@pytest.fixture(scope='module')
def compared(tmp_path_factory):
    borrowed = tmp_path_factory.mktemp('borrowed')
    for name in ('safetensors', 'tqdm'):  # which kp2d_core cannot do without
        found = importlib.util.find_spec(name)
        if found is None:
            pytest.skip(f'{name} is not installed')
        (borrowed / name).symlink_to(Path(found.origin).parent)
    paths = [os.environ.get('PYTHONPATH', ''), str(ROOT), str(borrowed)]
    environment = os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, paths))}
    for python in (sys.executable, os.environ.get('KP2D_CV_BRIDGE_PYTHON'), '/usr/bin/python3'):
        has = [python, '-c', 'import cv_bridge, cv2, sensor_msgs.msg']
        if not python or not Path(python).exists():
            continue
        if subprocess.run(has, env=environment, capture_output=True, timeout=60).returncode == 0:
            break
    else:
        pytest.skip(
            'no Python here has cv_bridge: it has no wheel and comes with ROS or with the '
            'package python3-cv-bridge of Debian and Ubuntu'
        )
    result = subprocess.run(
        [python, str(ROOT / 'test' / 'cv_bridge_parity.py')],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return json.loads(result.stdout)


def test_the_node_gives_the_same_pixels_with_it_and_without(compared):
    assert all(found['node'] == 0 for found in compared['encodings'].values()), compared


def test_every_encoding_that_both_have_gives_the_same_pixels(compared):
    if not compared['used']:
        pytest.skip(compared['sentence'])
    known = {name: found for name, found in compared['encodings'].items() if not found['refused']}
    assert set(SHARED) <= set(known)
    assert all(found['cv_bridge'] == 0 for found in known.values()), known
