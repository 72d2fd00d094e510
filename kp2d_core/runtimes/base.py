"""The interface of all runtimes, and the base class of those that compile ONNX graphs."""

from __future__ import annotations

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import cv2
import numpy as np
from numpy.typing import NDArray

from kp2d_core.errors import FileError, ModelError
from kp2d_core.export.source import ModelSource, Profile
from kp2d_core.images import Size

Array = NDArray[np.float32]
# Runs one compiled graph on uint8 images of the profile's shape. The outputs are in the order of
# `ModelSource.outputs` and stay valid.
Compiled = Callable[[NDArray[np.uint8]], Mapping[Any, Array]]
# Describes keypoints (N, 2) of one image from its texels (T, C): (N, D).
Describe = Callable[[NDArray[Any], Array], Array]

SIGMA = 1.0  # px, if the network does not estimate it
KEPT = 8  # compiled profiles (two image sizes at four scales); the oldest is dropped first
ALWAYS_KEPT = 4  # compiled profiles of any size: one image at four scales
SPARE = 1.5  # a graph with up to this many times the keypoints is reused instead of a new one
KEPT_PIXELS = 1 << 25  # limit of all profiles beyond ALWAYS_KEPT: memory grows with the image


class Describer:
    """Describes keypoints of one image, with the second part of a network (`build_parts`)."""

    def __init__(self, graph: Callable[[list[Any]], Any], count: int, size: int) -> None:
        """`graph` takes texels (1, T, C) and `count` keypoints, and gives (1, count, size)."""
        self.size = size
        self._graph, self._count = graph, count
        self._one_at_a_time = threading.Lock()

    def __call__(self, texels: NDArray[Any], keypoints: Array) -> Array:
        described = np.empty((len(keypoints), self.size), np.float32)
        points = np.zeros((1, self._count, 2), np.float32)
        for start in range(0, len(keypoints), self._count):
            part = keypoints[start : start + self._count]
            points[0, : len(part)] = part
            with self._one_at_a_time:
                found = self._graph([texels[None], points])[0]
            described[start : start + len(part)] = found[0, : len(part)]
        return described


class Network(NamedTuple):
    """A compiled network; if it has a `describe`, its last output are texels to describe from."""

    run: Compiled
    describe: Describer | None = None


class LateDescriptors:
    """Descriptors (B, K, D) that are computed when they are read: `late[image, rows]`."""

    def __init__(
        self, describe: Describe, texels: NDArray[Any], keypoints: Array, size: int
    ) -> None:
        self.describe = describe
        self.shape = (*keypoints.shape[:2], size)
        self._texels = texels  # of all images
        self._keypoints = keypoints

    def __getitem__(self, which: Any) -> Any:
        """Compute those of one image, (N, D); or cut without computing, if `which` has a slice."""
        image, rows = which if isinstance(which, tuple) else (which, slice(None))
        texels, keypoints = self._texels[image], self._keypoints[image, rows]
        if isinstance(image, slice):
            return LateDescriptors(self.describe, texels, keypoints, self.shape[2])
        return self.describe(texels, keypoints)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        every = np.stack([self[image] for image in range(self.shape[0])])
        return every.astype(dtype or np.float32, copy=False)


class Outputs(NamedTuple):
    """The best K keypoints of each of B images."""

    keypoints: Array  # (B, K, 2) in pixels of the input
    scores: Array  # (B, K) descending
    descriptors: Array | LateDescriptors  # (B, K, D) of unit length
    sigmas: Array  # (B, K) expected error of the keypoints in px; SIGMA if not estimated


class Runtime(Protocol):
    """Runs KeyPointNet on uint8 images and keeps the `top_k` cells with the highest scores."""

    name: str  # as in `KeypointDetector.load(runtime=...)`
    description: str  # library, version, device and precision
    model: str  # a shipped name or a file
    digest: str  # of the weights; '': not known
    reason: str  # why it was chosen
    problem: str  # which better runtime is installed but broken; '': none
    descriptor_size: int
    cell: int  # side of the square with one keypoint, in pixels
    score_line: tuple[float, float]  # `Architecture.score_line`
    fixed_size: Size | None  # (width, height) if it runs at one size only

    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        """Run on RGB images (B, H, W, 3), H and W multiples of 8; K may be less than top_k."""
        ...

    def prepare(self, shape: tuple[int, ...], top_k: int) -> None:
        """Compile in advance for images of a shape, from any thread."""
        ...

    def share(self, count: int) -> int:
        """Let up to `count` threads run images at the same time; return how many then do.

        Each has its share of the CPU. Call it before anything is compiled. 1: they wait for each
        other, so one batch of all images is better.
        """
        ...


class RuntimeStatus(NamedTuple):
    """Whether a runtime works on this machine."""

    name: str
    available: bool
    detail: str  # version and device; or what is missing, and the line that installs it


def cache_folder(name: str) -> Path:
    """Return the cache folder: $XDG_CACHE_HOME/kp2d/<name>, else in ~/.cache."""
    base = os.environ.get('XDG_CACHE_HOME')
    return (Path(base) if base else Path.home() / '.cache') / 'kp2d' / name


class CompiledRuntime(ABC):
    """Base class of the runtimes that compile graphs; they add `compile`, and some `make`."""

    name: str
    most_keypoints: int | None = None  # a limit of the runtime
    parallel = False  # whether several threads may run one compiled graph at once
    compiles_beside = True  # whether it can compile one graph while it runs another

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self.digest = source.digest
        self.descriptor_size = source.architecture.descriptor_size
        self.cell = source.architecture.cell
        self.score_line = source.architecture.score_line
        self.description = self.name
        self.model = self.reason = self.problem = ''
        self.fixed_size: Size | None = None
        if source.fixed is not None:
            self.fixed_size = (source.fixed.width, source.fixed.height)
        self._compiled: OrderedDict[Profile, Network] = OrderedDict()
        self._profiles: dict[tuple[tuple[int, ...], int], Profile] = {}  # of shape and top_k
        self._lock = threading.Lock()

    def share(self, count: int) -> int:
        return 1

    @abstractmethod
    def compile(self, graph: bytes, profile: Profile) -> Compiled:
        """Compile a graph to a function."""

    def make(self, profile: Profile) -> Network:
        """Compile the network for a profile."""
        return Network(self.compile(self.source.graph_for(profile), profile))

    def run(self, images: NDArray[np.uint8], top_k: int) -> Outputs:
        """Run from any thread; threads wait for each other if the runtime is not parallel."""
        asked = images.shape, top_k
        profile = self._profiles.get(asked) or self.source.profile(*asked, self.most_keypoints)
        images = _in_colour_of(profile, images)
        try:
            with self._lock:
                profile, network = self._get(profile)
                self._profiles[asked] = profile
                outputs = None if self.parallel else _run(network, profile, images)
            outputs = outputs or _run(network, profile, images)
            self._check(outputs, (len(images), profile.top_k))
        except (FileError, ValueError, MemoryError):
            raise
        except Exception as error:  # the errors of the libraries have no common base
            raise self._refusal(profile, error) from error
        if top_k < profile.top_k:
            outputs = Outputs(*(output[:, :top_k] for output in outputs))
        return outputs

    def prepare(self, shape: tuple[int, ...], top_k: int) -> None:
        """Compile for images of a shape, unless a graph with slightly more keypoints exists."""
        profile = self.source.profile(shape, top_k, self.most_keypoints)
        if not self.compiles_beside:
            with self._lock:
                self._get(profile)
            return
        with self._lock:
            serving = self._serving(profile)
        if serving is None or serving.top_k > SPARE * profile.top_k:
            try:
                compiled = self.make(profile)
            except (FileError, ValueError, MemoryError):
                raise
            except Exception as error:  # the errors of the libraries have no common base
                raise self._refusal(profile, error) from error
            with self._lock:
                self._keep(profile, compiled)

    def _get(self, profile: Profile) -> tuple[Profile, Network]:
        """Return a compiled graph with enough keypoints; compile and keep it if needed."""
        serving = profile if profile in self._compiled else self._serving(profile)
        if serving is None:
            self._keep(profile, self.make(profile))
            serving = profile
        self._compiled.move_to_end(serving)
        return serving, self._compiled[serving]

    def _serving(self, profile: Profile) -> Profile | None:
        """Find a compiled profile that differs only by more keypoints."""
        same = [
            each
            for each in self._compiled
            if each.top_k >= profile.top_k and each.sizes == profile.sizes
        ]
        return min(same, key=lambda each: each.top_k, default=None)

    def _keep(self, profile: Profile, compiled: Network) -> None:
        """Keep a graph; drop those that differ only in the number of keypoints, and the oldest."""
        for each in [*self._compiled]:
            if each.sizes == profile.sizes:
                del self._compiled[each]
        self._compiled[profile] = compiled
        self._profiles.clear()
        while too_many(self._compiled):
            self._compiled.popitem(last=False)
        give_back_memory()

    def _check(self, outputs: Outputs, shape: tuple[int, int]) -> None:
        """Raise an error for invalid outputs: an exported file may be damaged."""
        wanted = (*shape, 2), shape, (*shape, self.descriptor_size), shape
        if tuple(output.shape for output in outputs) != wanted:
            raise RuntimeError(f'its outputs have shapes other than {wanted}')

    def _refusal(self, profile: Profile, error: Exception) -> Exception:
        reason = ' '.join(str(error).split())[:300] or type(error).__name__
        if self.source.graph is not None:
            return ModelError(f'{self.model} is damaged, {self.name} cannot run it: {reason}')
        return RuntimeError(f'{self.name} cannot run the network at {profile}: {reason}')


def give_back_memory() -> None:
    """Return free memory to the system: glibc fragments it and grows with every compilation."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def too_many(profiles: Collection[Profile]) -> bool:
    """Whether these compiled graphs take too much memory."""
    pixels = sum(each.width * each.height * (each.batch or 1) for each in profiles)
    return len(profiles) > (KEPT if pixels <= KEPT_PIXELS else ALWAYS_KEPT)


def _run(network: Network, profile: Profile, images: NDArray[np.uint8]) -> Outputs:
    if network.describe is not None:
        keypoints, scores, *sigmas, texels = network.run(images).values()
        late = LateDescriptors(network.describe, texels, keypoints, network.describe.size)
        return with_sigmas([keypoints, scores, late, *sigmas])
    if profile.batch in (None, len(images)):
        return with_sigmas(network.run(images).values())
    return with_sigmas(_in_parts(network.run, images, profile.batch or 1))


def with_sigmas(outputs: Iterable[Any]) -> Outputs:
    """Make Outputs from those of a graph that may have no sigmas."""
    values = [*outputs]
    if len(values) < 3:
        raise RuntimeError(f'it has {len(values)} outputs instead of 3 or 4')
    keypoints, scores, descriptors, *sigmas = values
    return Outputs(
        keypoints, scores, descriptors, sigmas[0] if sigmas else np.full_like(scores, SIGMA)
    )


def _in_colour_of(profile: Profile, images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert images to gray for a mono graph and to RGB for the others."""
    if (images.shape[-1] == 1) == profile.mono:
        return images
    if not profile.mono:
        return np.repeat(images, 3, axis=-1)
    return np.stack([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None] for image in images])


def _in_parts(compiled: Compiled, images: NDArray[np.uint8], batch: int) -> list[Array]:
    """Run a graph of fixed batch size as often as needed; pad the last batch."""
    filled = np.concatenate([images, np.repeat(images[-1:], -len(images) % batch, axis=0)])
    parts = [compiled(filled[i : i + batch]).values() for i in range(0, len(filled), batch)]
    return [np.concatenate(output)[: len(images)] for output in zip(*parts, strict=True)]
