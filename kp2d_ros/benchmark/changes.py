"""The changes part of `kp2d bench node`: memory while settings, sizes and states change."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from lifecycle_msgs.msg import Transition
from tqdm import tqdm

from kp2d_ros.benchmark.rig import Rig

FRAMES = 8  # after each change
SIZES = [(320, 240), (256, 192), (424, 240), (240, 320), (160, 120), (400, 300)]
SETTINGS: list[dict[str, Any]] = [
    {'max_keypoints': 300},
    {'scales': [1.0, 0.5]},
    {'working_size': 200},
    {'track': False},
    {'max_keypoints': 1000, 'descriptor_format': 'float32'},
    {'track': True, 'refine_matches': True},
    {'working_size': 0, 'scales': [1.0]},
    {'refine_matches': False, 'descriptor_format': 'int8'},
]
AWAKE = [Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_ACTIVATE]
ANEW = [
    Transition.TRANSITION_DEACTIVATE,
    Transition.TRANSITION_CLEANUP,
    Transition.TRANSITION_CONFIGURE,
    Transition.TRANSITION_ACTIVATE,
]


def changes(rig: Rig) -> Iterator[None]:
    """Make one change after the other, without end."""
    for number in itertools.count():
        rig.show(SIZES[number % len(SIZES)], 10)
        yield
        rig.set(**SETTINGS[number % len(SETTINGS)])
        yield
        if number % 2:
            for transition in ANEW if number % 4 == 3 else AWAKE:
                rig.transition(transition)
            rig.answers.clear()
            rig.ready()  # its new subscription takes a moment to find the camera
            yield


def memory_under(rig: Rig, seconds: float) -> tuple[list[float], list[float], int]:
    """Times in seconds, resident memory in MB after each change; frames that got no answer."""
    times, memory, unanswered = [], [], 0
    began = time.perf_counter()
    with tqdm(total=round(seconds), desc='changes', unit='s') as bar:
        for _ in changes(rig):
            for _ in range(FRAMES):
                unanswered += rig.exchange() is None
            passed = time.perf_counter() - began
            times.append(passed)
            memory.append(rig.memory())
            bar.set_postfix_str(f'{memory[-1]:.0f} MB')
            bar.update(int(passed) - bar.n)
            rig.answers.clear()
            rig.sent.clear()
            if passed > seconds:
                return times, memory, unanswered
    raise AssertionError


def growth(times: list[float], memory: list[float]) -> float:
    """MB per minute over the last two thirds; in the first third, caches fill up."""
    third = len(memory) // 3
    if third < 2:
        return 0.0
    return float(np.polyfit(times[third:], memory[third:], 1)[0]) * 60
