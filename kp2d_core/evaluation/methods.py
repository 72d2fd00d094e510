"""The extractors of a comparison: models in their precisions, and classical baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from kp2d_core.detector import DEFAULT_SCALES, KeypointDetector, check_scales
from kp2d_core.evaluation.foreign_network import RUNTIMES
from kp2d_core.evaluation.onnx_extractor import onnx_extractor, read_description
from kp2d_core.evaluation.protocol import Extract
from kp2d_core.features import Features, unit_descriptors
from kp2d_core.images import Image, Size, size_of


@dataclass(frozen=True)
class NamedExtractor:
    """An extractor with its name in the tables."""

    name: str  # short and unique
    description: str  # the runtime or library that runs it
    extract: Extract  # returns all points, including copies
    scores_are_shares: bool = False  # scores predict how often a point is found again


def open_methods(
    models: Iterable[str],
    baselines: Iterable[str],
    *,
    runtime: str = 'auto',
    precisions: Iterable[str] = ('fp32',),
    threads: int | None = None,
    scales: Sequence[float] | None = None,
    size: Size = (320, 240),
    top_k: int = 300,
) -> list[NamedExtractor]:
    """Open every model in every precision, then the baselines.

    A model is anything that `KeypointDetector.load` takes, or a YAML file that describes another
    ONNX network (see `onnx_extractor`), which has only one precision. `scales` are those of
    `detect`; `size` and `top_k` are those of the evaluation.
    """
    models, precisions = list(models), list(precisions)
    rescaled = scales is not None and check_scales(scales) != (1.0,)
    methods: list[NamedExtractor] = []
    for model, name in zip(models, _short_names(models), strict=True):
        if Path(model).suffix in ('.yaml', '.yml'):
            extract = onnx_extractor(model, threads)
            runner = RUNTIMES[read_description(model).runtime]
            methods.append(NamedExtractor(name, f'{runner}, {Path(model).name}', extract))
            continue
        for precision in precisions:
            if precision == 'auto' and Path(model).suffix != '.onnx':
                precision = 'fp32'  # not the fastest of this machine: figures must be comparable
            detector = KeypointDetector.load(
                model, runtime=runtime, precision=precision, threads=threads
            )
            fixed = detector.runtime.fixed_size
            if fixed is not None and fixed != size:
                raise ValueError(
                    f'{model} was exported for {fixed[0]}x{fixed[1]}, not {size[0]}x{size[1]}: '
                    f'evaluate it with --size {fixed[0]}x{fixed[1]}'
                )
            if fixed is not None and rescaled:
                raise ValueError(f'{model} was exported for one size: it has no other scales')
            title = name if len(precisions) == 1 else f'{name} {precision}'
            used = scales or (DEFAULT_SCALES if fixed is None else (1.0,))
            at = 'at ' + '+'.join(f'{scale:g}x' for scale in used)
            if scales is not None:
                title += f' {at}'
            extract = partial(
                detector.detect,
                scales=scales,
                max_keypoints=None,
                nms_radius=0.0,
                score_threshold=0.0,
            )
            description = f'{detector.runtime.description}, {at}'
            methods.append(NamedExtractor(title, description, extract, scores_are_shares=True))
    for name in baselines:
        methods.append(NamedExtractor(name, f'OpenCV {cv2.__version__}', baseline(name, top_k)))
    repeated = {each.name for each in methods if [m.name for m in methods].count(each.name) > 1}
    if repeated:
        raise ValueError(f'{repeated.pop()} is given twice')
    return methods


def _short_names(models: list[str]) -> list[str]:
    """Return file names without suffix, with as many folders as needed to make them unique."""
    paths = [Path(model) for model in models]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = [Path(*path.parts[-depth:]).with_suffix('').as_posix() for path in paths]
        if len(set(names)) == len(names):
            break
    return names if paths else []


def _create(name: str, **settings: Any) -> Any:
    """Create an OpenCV detector; version 5 moved some of them to the contrib module."""
    for module in (cv2, getattr(cv2, 'xfeatures2d', None)):
        if hasattr(module, f'{name}_create'):
            return getattr(module, f'{name}_create')(**settings)
    raise ValueError(f'this OpenCV has no {name}: install opencv-contrib-python-headless')


# ORB distributes a given number of points over its pyramid. With 1000, the repeatability of the
# best 300 is within 0.006 of the paper's on its three sequences; with 500, OpenCV's default, it
# differs by up to 0.12.
_METHODS: dict[str, Callable[[int], Any]] = {
    'sift': lambda top_k: _create('SIFT'),
    'orb': lambda top_k: _create('ORB', nfeatures=max(1000, 2 * top_k)),
    'brisk': lambda top_k: _create('BRISK'),
    'akaze': lambda top_k: _create('AKAZE'),
}
BASELINES = tuple(_METHODS)


def baseline(name: str, top_k: int = 300) -> Extract:
    """Open 'sift', 'orb', 'brisk' or 'akaze' with OpenCV's defaults; scores are its responses."""
    if name not in _METHODS:
        raise ValueError(f"there is no baseline '{name}': choose from {', '.join(BASELINES)}")
    method = _METHODS[name](top_k)

    def extract(image: Image) -> Features:
        gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.ndim == 3 else image
        found, descriptors = method.detectAndCompute(gray, None)
        points = np.array([point.pt for point in found], np.float32).reshape(-1, 2)
        scores = np.array([point.response for point in found], np.float32)
        if descriptors is None:
            descriptors = np.empty((0, method.descriptorSize()), np.float32)
        order = np.argsort(-scores, kind='stable')
        unit = unit_descriptors(descriptors)
        return Features(points[order], scores[order], unit[order], size_of(image))

    return extract
