"""The detector: from an image to features, with any runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, overload

import numpy as np
from numpy.typing import NDArray

from kp2d_core.checks import number, shown, whole
from kp2d_core.features import Features, Selection, alike, cells_to_ask, find, prepare
from kp2d_core.images import (
    MINIMUM_SIDE,
    MOST_RUN,
    Image,
    Size,
    check_mask,
    check_pixels,
    resolve_size,
    size_of,
    to_image,
)
from kp2d_core.runtimes import Runtime, open_runtime

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kp2d_core.images import ImageLike

# A quarter more pixels than one scale; points are found again at other distances.
DEFAULT_SCALES = (1.0, 0.5)
MOST_SCALES = 4  # a runtime keeps a compiled network for each
SCALE_RANGE = (0.1, 4.0)
MOST_KEYPOINTS = 2000  # per image, by default
MOST_RADIUS = 256  # pixels
SCORE_THRESHOLD = 0.45  # black, flat and defocused images have almost no points above it
NMS_RADIUS = 3.0  # pixels; each place gives one keypoint
# Candidates to request per wanted keypoint, by cell size of the network: the others are copies.
SPARE = {8: 3.0, 4: 4.5}
COMPILER_THREAD = 'kp2d compiler'
AT_ONCE = 0.05  # seconds to wait for a compilation before old settings are used
PAUSE = 5.0  # seconds before a failed compilation is tried again


class Options(TypedDict, total=False):
    """The keywords of `detect`."""

    working_size: Size | int | None
    scales: Sequence[float] | None
    max_keypoints: int | None
    score_threshold: float
    nms_radius: float
    mask: Image | NDArray[np.bool_] | None


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
        """Load a model.

        model      name of a shipped model, a .safetensors file or an exported .onnx model; 'auto'
                   is 'small' on every machine
        runtime    'auto' selects the best runtime of this machine; see `kp2d info`
        precision  'fp32', 'fp16' or 'int8'; 'auto': int8 with OpenVINO on a CPU with VNNI or AMX,
                   fp16 with TensorRT, else fp32; an exported model keeps its own
        threads    CPU threads; None: the runtime decides
        """
        return cls(open_runtime(model, runtime=runtime, precision=precision, threads=threads))

    @overload
    def detect(self, image: ImageLike, **options: Unpack[Options]) -> Features: ...

    @overload
    def detect(self, image: list[Any], **options: Unpack[Options]) -> list[Features]: ...

    def detect(
        self,
        image: ImageLike | list[Any],
        *,
        working_size: Size | int | None = None,
        scales: Sequence[float] | None = None,
        max_keypoints: int | None = MOST_KEYPOINTS,
        score_threshold: float = SCORE_THRESHOLD,
        nms_radius: float = NMS_RADIUS,
        mask: Image | NDArray[np.bool_] | None = None,
    ) -> Features | list[Features]:
        """Detect keypoints: `Features` in pixels of the image, highest score first.

        A list of images gives a list of `Features`.

        image            a path, an array, a PIL image or a torch tensor (see `to_image`); images
                         of the same size in a list run as a batch
        working_size     size for the network, (width, height) or the longer side; None: do not
                         resize
        scales           run the network at each of these multiples of the working size and keep
                         the best keypoints of all; None: (1, 0.5), or (1,) for an exported model
        max_keypoints    keep at most this many, those with the highest scores; None: one per cell
                         and scale above the threshold
        score_threshold  keep scores above this; with the default, black, flat and defocused
                         images give almost no keypoints
        nms_radius       drop a keypoint that lies closer than this many pixels to a better one;
                         0: keep all, as in the paper
        mask             HxW, keypoints where it is 0 are dropped; images of a list then have one
                         size
        """
        single = not isinstance(image, list | tuple)
        given: list[Any] = [image] if single else list(image)  # type: ignore[arg-type]
        names = ['image'] if single else [f'image {index}' for index in range(len(given))]
        images = [to_image(each, name) for each, name in zip(given, names, strict=True)]
        if mask is not None:
            for each in images:
                mask = check_mask(mask, size_of(each))
        if max_keypoints is not None:
            max_keypoints = whole(max_keypoints, 'max_keypoints', least=1)
        score_threshold = number(score_threshold, 'score_threshold')
        nms_radius = number(nms_radius, 'nms_radius', least=0, most=MOST_RADIUS)

        sizes = [self.working_sizes(size_of(each), working_size, scales) for each in images]
        found = find(
            self.runtime,
            images,
            sizes,
            self.limit(max_keypoints, nms_radius, mask is not None),
            Selection(max_keypoints, score_threshold, nms_radius),
            [None if mask is None else mask.astype(np.uint8, copy=False)] * len(images),
        )
        return found[0] if single else found

    def limit(self, max_keypoints: int | None, nms_radius: float, masked: bool) -> int | None:
        """Return how many points to request from the network; None: all of them."""
        # A mask drops points after the network has ranked them, so request all. Suppression also
        # drops points, but their share is known well enough.
        if max_keypoints is None or masked:
            return None
        return round(max_keypoints * SPARE[self.runtime.cell]) if nms_radius else max_keypoints

    def prepare(
        self,
        size: Size,
        *,
        count: int = 1,
        working_size: Size | int | None = None,
        scales: Sequence[float] | None = None,
        limit: int | None = None,
    ) -> None:
        """Compile in advance for batches of `count` images of a size.

        `limit` is a result of the method `limit`. Another thread may call `detect` meanwhile.
        """
        image = np.zeros((size[1], size[0], 3), np.uint8)
        sizes = self.working_sizes(size, working_size, scales)
        batches = {len(same) for same in alike([image] * count, [sizes] * count)}
        for working in sizes:
            blank, placement = prepare(image, working)
            top_k = cells_to_ask(blank, placement, self.runtime.cell, limit)
            for batch in batches:
                self.runtime.prepare((batch, *blank.shape), top_k)

    def working_sizes(
        self, given: Size, working_size: Size | int | None, scales: Sequence[float] | None
    ) -> list[Size]:
        """Return the sizes that the network runs at; raise ValueError if it cannot."""
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


def check_scales(scales: Sequence[float]) -> tuple[float, ...]:
    """Return the scales as floats; raise ValueError unless they differ and are in range."""
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
    """Return the image size at each scale, without duplicates; raise ValueError if out of range.

    None selects the default scales, without those that are too small.
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


@dataclass(frozen=True)
class Work:
    """The settings that a compiled network depends on."""

    image_sizes: tuple[Size, ...]  # of the images of one call
    working_size: int | None
    scales: tuple[float, ...]
    limit: int | None  # keypoints to request from the network; None: one per cell

    def __str__(self) -> str:
        width, height = self.image_sizes[0]
        limit = 'all' if self.limit is None else self.limit
        return f'{width}x{height} images and {limit} keypoints'


class Compiler:
    """Compiles networks in advance, so that a stream of images does not wait for it."""

    def __init__(self, detector: KeypointDetector, in_background: bool) -> None:
        """With `in_background`, old settings stay in use while the new ones are compiled."""
        self.preparing = ''  # a description of the settings that are being compiled
        self.problem = ''  # why the last compilation failed
        self._detector = detector
        self._in_background = in_background
        self._ready: Work | None = None  # the last one compiled
        self._failed: Work | None = None
        self._again_at = 0.0  # time.monotonic()
        self._thread: threading.Thread | None = None

    def ready_for(self, work: Work) -> Work:
        """Return the settings to use: these or, while they are being compiled, the previous ones.

        Only the first images of a size wait for the compiler.
        """
        ready = self._ready
        if work == ready:
            return work
        refused = work == self._failed and time.monotonic() < self._again_at
        if not self._in_background or ready is None or ready.image_sizes != work.image_sizes:
            if not refused:
                self._compile(work)
            if self.problem:
                raise RuntimeError(self.problem)
            return work
        compiling = self._thread is not None and self._thread.is_alive()
        if not compiling and not refused:
            self._thread = threading.Thread(
                target=self._compile, args=(work,), name=COMPILER_THREAD, daemon=True
            )
            self._thread.start()
            self._thread.join(AT_ONCE)
        return work if self._ready == work else ready

    def _compile(self, work: Work) -> None:
        self.preparing = str(work)
        try:
            for size in dict.fromkeys(work.image_sizes):
                self._detector.prepare(
                    size,
                    count=work.image_sizes.count(size),
                    working_size=work.working_size,
                    scales=work.scales,
                    limit=work.limit,
                )
            self._ready, self._failed, self.problem = work, None, ''
        except Exception as error:  # a runtime may raise anything: keep the old network
            self._failed, self._again_at = work, time.monotonic() + PAUSE
            self.problem = f'the network cannot be compiled for {work}: {error}'
        finally:
            self.preparing = ''
