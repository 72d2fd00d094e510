"""The detector: an image in, features out, whichever runtime does the work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number, shown, whole
from kp2d_core.features import Features, in_order_of_score, join_features, select
from kp2d_core.images import (
    MINIMUM_SIDE,
    MOST_RUN,
    Image,
    Placement,
    Size,
    check_image,
    check_mask,
    check_pixels,
    prepare,
    resolve_size,
    size_of,
)
from kp2d_core.runtimes import Runtime, open_runtime

# A quarter more pixels than one scale, for points that are found again from nearer or further.
DEFAULT_SCALES = (1.0, 0.5)
MOST_SCALES = 4  # for each of which a runtime keeps a compiled network
SCALE_RANGE = (0.1, 4.0)
MOST_KEYPOINTS = 2000  # of an image, unless another number is asked for
MOST_RADIUS = 256  # pixels


class KeypointDetector:
    """Finds keypoints in images of any size.

    >>> detector = KeypointDetector.load('small')
    >>> features = detector.detect(rgb, max_keypoints=500)
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @classmethod
    def load(
        cls,
        model: str | Path = 'auto',
        *,
        runtime: str = 'auto',
        precision: str = 'auto',
        threads: int | None = None,
    ) -> KeypointDetector:
        """A shipped model by name ('small'), a .safetensors file, or an exported .onnx model.

        model      'auto' takes 'v4' where TensorRT runs on a GPU, else 'small'
        runtime    'auto' takes the best that this machine has; see `kp2d info`
        precision  'fp32', 'fp16' or 'int8'; 'auto': fp32, or what the exported model has
        threads    of the CPU; None leaves it to the runtime
        """
        return cls(open_runtime(model, runtime=runtime, precision=precision, threads=threads))

    def detect(
        self,
        image: Image,
        *,
        working_size: Size | int | None = None,
        scales: Sequence[float] | None = None,
        max_keypoints: int | None = MOST_KEYPOINTS,
        score_threshold: float = 0.0,
        nms_radius: float = 0.0,
        mask: Image | NDArray[np.bool_] | None = None,
    ) -> Features:
        """Features of an RGB or gray uint8 image, in its own pixels, highest score first.

        working_size     (width, height) to run the network at, or the longer side; None: as given
        scales           run it at so many times that size, each of them, and take the best of all;
                         None: at 1 and 0.5, or at 1 alone if the model was exported for one size
        max_keypoints    the best so many; None: one for each cell (and scale) above threshold
        score_threshold  keep scores above it
        nms_radius       keep only the best within so many pixels; 0: no suppression, as the paper
        mask             HxW, keypoints are kept where it is not 0
        """
        check_image(image)
        if mask is not None:
            mask = check_mask(mask, size_of(image))
        if max_keypoints is not None:
            max_keypoints = whole(max_keypoints, 'max_keypoints', least=1)
        score_threshold = number(score_threshold, 'score_threshold')
        nms_radius = number(nms_radius, 'nms_radius', least=0, most=MOST_RADIUS)

        # Mask and suppression drop points after the network ranked them: ask for all then.
        limit = max_keypoints if mask is None and nms_radius == 0 else None
        sizes = self._working_sizes(size_of(image), working_size, scales)
        found = [self._run(image, size, limit) for size in sizes]
        return select(
            found[0] if len(found) == 1 else in_order_of_score(join_features(found)),
            max_keypoints=max_keypoints,
            score_threshold=score_threshold,
            nms_radius=nms_radius,
            mask=mask,
        )

    def _working_sizes(
        self, given: Size, working_size: Size | int | None, scales: Sequence[float] | None
    ) -> list[Size]:
        """The sizes that the network runs at; ValueError if it cannot."""
        width, height = resolve_size(given, working_size)
        fixed = self.runtime.fixed_size
        if fixed is None:
            return scaled_sizes((width, height), scales)
        rescaled = scales is not None and check_scales(scales) != (1.0,)
        if (working_size and (width, height) != fixed) or rescaled:
            other = f'scales {scales}' if rescaled else f'another size, {working_size}'
            raise ValueError(
                f'the model was exported for {fixed[0]}x{fixed[1]} images: it cannot work at '
                f'{other}'
            )
        return [fixed]

    def _run(self, image: Image, working_size: Size, max_keypoints: int | None) -> Features:
        """What the network finds at one size, some of it perhaps in the padding."""
        network_input, placement = prepare(image, working_size)
        height, width = network_input.shape[:2]
        cell = self.runtime.cell
        top_k = cells = (height // cell) * (width // cell)
        if max_keypoints is not None:
            top_k = min(max_keypoints + points_in_padding(network_input, placement, cell), cells)
        keypoints, scores, descriptors = self.runtime.run(network_input[None], top_k)
        return Features(
            placement.to_given(keypoints[0]), scores[0], descriptors[0], size_of(image)
        )


def points_in_padding(network_input: Image, placement: Placement, cell: int) -> int:
    """How many keypoints can lie in the padding: those of its cells, and of the ones beside it."""
    height, width = network_input.shape[:2]
    right, below = width - placement.working[0], height - placement.working[1]
    rows, columns = (-(-pad // cell) + 1 if pad else 0 for pad in (below, right))
    return rows * (width // cell) + columns * (height // cell)


def check_scales(scales: Sequence[float]) -> tuple[float, ...]:
    """All different and in range, as floats; ValueError if not."""
    low, high = SCALE_RANGE
    try:
        values = tuple(number(scale, 'a scale', least=low, most=high) for scale in scales)
    except (TypeError, ValueError):
        values = ()
    if not 1 <= len(values) <= MOST_SCALES or len(set(values)) < len(values):
        raise ValueError(
            f'scales must be 1 to {MOST_SCALES} different numbers from {low} to {high}, '
            f'got {shown(scales)}'
        )
    return values


def scaled_sizes(size: Size, scales: Sequence[float] | None) -> list[Size]:
    """The size at each scale, each once; ValueError if one is too small or large to work at.

    None: at the default scales, but for one that is too small.
    """
    chosen = DEFAULT_SCALES if scales is None else check_scales(scales)
    sizes = [(round(size[0] * scale), round(size[1] * scale)) for scale in chosen]
    for scale, each in zip(chosen, sizes, strict=True):
        if scales is not None and min(each) < MINIMUM_SIDE:
            raise ValueError(
                f'at scale {scale:g} the network would run at {each[0]}x{each[1]}: sides must be '
                f'{MINIMUM_SIDE} pixels or more'
            )
        check_pixels(each, MOST_RUN, f'at scale {scale:g} the network would run at')
    return [each for each in dict.fromkeys(sizes) if min(each) >= MINIMUM_SIDE]
