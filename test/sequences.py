"""A folder in HPatches layout, made from photographs, for tests."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np


def write_sequences(folder: Path, photographs: dict[str, np.ndarray]) -> Path:
    """Write v_astronaut (another viewpoint), i_coffee (darker) and i_same (no change)."""
    views = {
        'v_astronaut': [
            np.array([[0.95, 0.05, 10], [-0.05, 0.97, 15], [1e-5, 2e-5, 1]]),
            np.array([[0.8, 0.25, 0], [-0.25, 0.8, 100], [2e-5, 0, 1]]),
        ],
        'i_coffee': [np.eye(3), np.eye(3)],
        'i_same': [np.eye(3)],
    }
    for name, homographies in views.items():
        target = folder / name
        target.mkdir(parents=True)
        image = photographs['chelsea' if name == 'i_same' else name[2:]][..., ::-1]
        cv2.imwrite(str(target / '1.png'), image)
        for number, homography in enumerate(homographies, 2):
            size = image.shape[1], image.shape[0]
            view = cv2.warpPerspective(image, homography, size)
            if name == 'i_coffee':
                view = (view * (0.9 - 0.3 * (number - 2))).astype(np.uint8)
            cv2.imwrite(str(target / f'{number}.png'), view)
            np.savetxt(target / f'H_1_{number}', homography)
    return folder
