"""The scales that an image is looked at: what they may be, and the sizes that they give."""

from __future__ import annotations

from collections.abc import Sequence

from kp2d_core.images import MINIMUM_SIDE, Size

# A quarter more pixels than one scale, for points that are found again from nearer or further.
DEFAULT_SCALES = (1.0, 0.5)
MOST_SCALES = 4  # for each of which a runtime keeps a compiled network
SCALE_RANGE = (0.1, 4.0)
LARGEST_SIDE = 8192  # pixels that an image is enlarged to: beyond it memory runs out


def check_scales(scales: Sequence[float]) -> tuple[float, ...]:
    """All different and in range, as floats; ValueError if not."""
    low, high = SCALE_RANGE
    try:
        values = tuple(float(scale) for scale in scales)
    except (TypeError, ValueError):
        values = ()
    different = len(set(values)) == len(values)
    in_range = all(low <= value <= high for value in values)
    if not (different and in_range and 1 <= len(values) <= MOST_SCALES):
        raise ValueError(
            f'scales must be 1 to {MOST_SCALES} different numbers from {low} to {high}, '
            f'got {list(scales) if values else scales!r}'
        )
    return values


def scaled_sizes(size: Size, scales: Sequence[float] | None) -> list[Size]:
    """The size at each scale, each once; ValueError if one is too small or large to work at.

    None: at the default scales, but for one that is too small.
    """
    chosen = DEFAULT_SCALES if scales is None else check_scales(scales)
    sizes = [(round(size[0] * scale), round(size[1] * scale)) for scale in chosen]
    if scales is None:
        return [each for each in sizes if min(each) >= MINIMUM_SIDE]
    for scale, (width, height) in zip(chosen, sizes, strict=True):
        enlarged_too_far = scale > 1 and max(width, height) > LARGEST_SIDE
        if min(width, height) < MINIMUM_SIDE or enlarged_too_far:
            raise ValueError(
                f'at scale {scale:g} the network would run at {width}x{height}: sides must be '
                f'{MINIMUM_SIDE} to {LARGEST_SIDE} pixels'
            )
    return list(dict.fromkeys(sizes))
