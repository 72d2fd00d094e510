"""A thin layer for writing ONNX graphs; bilinear sampling and refinement written with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from kp2d_core.architecture import REFINE_RADIUS, REFINE_SPREAD, REFINE_STEPS
from kp2d_core.geometry import resize_matrix
from kp2d_core.version import __version__

# Supported by TensorRT since 10.3, OpenVINO and ONNX Runtime.
OPSET = 17
IR_VERSION = 8


class GraphWriter:
    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add a node with one output; node and output have the same name."""
        return self.add_many(operator, inputs, [name], **attributes)[0]

    def add_many(
        self, operator: str, inputs: Sequence[str], names: Sequence[str], **attributes: Any
    ) -> list[str]:
        node = helper.make_node(operator, list(inputs), list(names), name=names[0], **attributes)
        self.nodes.append(node)
        return list(names)

    def constant(self, name: str, value: NDArray[Any]) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value, order='C'), name))
        return name

    def scalar(self, name: str, value: float, dtype: Any = np.float32) -> str:
        return self.constant(name, np.asarray(value, dtype))

    def indices(self, name: str, values: Sequence[int]) -> str:
        return self.constant(name, np.asarray(values, np.int64))

    def cast(self, tensor: str, dtype: Any, name: str) -> str:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.add('Cast', [tensor], name, to=kind)

    def model(
        self,
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        metadata: dict[str, str],
    ) -> ModelProto:
        graph = helper.make_graph(
            self.nodes, 'KeyPointNet', list(inputs), list(outputs), self.initializers
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid('', OPSET)],
            ir_version=IR_VERSION,
            producer_name='kp2d',
            producer_version=__version__,
        )
        helper.set_model_props(model, metadata)
        return model


class MapShape(NamedTuple):
    """A feature map of an image; `pinned`: its corner texels lie on the corner pixels."""

    channels: int
    height: int
    width: int
    image_height: int
    image_width: int
    pinned: bool = True


def sample_patches(
    w: GraphWriter,
    texels: str,
    keypoints: str,
    shape: MapShape,
    top_k: int,
    radius: int,
    *,
    real: Callable[[str, str], str] | None = None,
    dtype: Any = np.float32,
) -> str:
    """Sample a map (B, h * w, C) at pixels (B, K, 2): (B, K, taps * C).

    The last descriptor convolution and bilinear sampling are both linear, so they commute. Sample
    the *input* of the convolution at a keypoint and its 8 neighbours and multiply by the kernel:
    the result is that of convolving the whole map and sampling it, at a fraction of the work.
    Texels outside the map are 0, like the padding of the convolution.

    A gather and a product replace GridSample. The gather reads whole texels (all channels), which
    are contiguous in the memory of the runtimes.

    Coordinates and weights are computed in float32 and multiplied in the `dtype` of the features.
    real(x, texels) dequantizes the gathered values if the features are int8 codes.
    """
    taps, reach = 2 * radius + 1, 2 * radius + 2  # texels along one axis: of the kernel, in reach
    size = np.array([shape.width, shape.height], np.float32)
    image_size = np.array([shape.image_width, shape.image_height], np.float32)
    if shape.pinned:
        scale = w.constant('texels_per_pixel', (size - 1) / (image_size - 1))
        places = w.add('Mul', [keypoints, scale], 'places')
    else:  # texels lie in the middle of their pixels; positions beyond the outermost are clamped
        pixels = shape.image_width, shape.image_height
        to_map = resize_matrix(pixels, (shape.width, shape.height)).astype(np.float32)
        ratio, offset = to_map.diagonal()[:2], to_map[:2, 2]
        places = w.add('Mul', [keypoints, w.constant('texels_per_pixel', ratio)], 'scaled')
        places = w.add('Add', [places, w.constant('half_pixel', offset)], 'free_places')
        places = w.add('Max', [places, w.scalar('least_texel', 0)], 'low_places')
        places = w.add('Min', [places, w.constant('most_texel', size - 1)], 'places')
    corner = w.add('Floor', [places], 'corner')
    fraction = w.add('Sub', [places, corner], 'fraction')

    # The rows and columns of texels around a keypoint: (B, K, 2, reach), x first.
    corner = w.add('Unsqueeze', [corner, w.indices('axis_3', [3])], 'corner_column')
    steps = np.arange(-radius, radius + 2, dtype=np.float32)
    wanted = w.add('Add', [corner, w.constant('steps', steps)], 'wanted')
    known = w.add('Max', [wanted, w.scalar('first_texel', 0)], 'known_low')
    known = w.add('Min', [known, w.constant('last_texel', size[:, None] - 1)], 'known')
    on_map = w.cast(w.add('Equal', [known, wanted], 'is_on_map'), np.float32, 'on_map')

    # The weight of each of them for each tap: (B, K, 2, taps, reach).
    near, far = np.eye(taps, reach, 0, np.float32), np.eye(taps, reach, 1, np.float32)
    fraction = w.add('Unsqueeze', [fraction, w.indices('axes_3_4', [3, 4])], 'fraction_matrix')
    shares = w.add('Mul', [fraction, w.constant('far_less_near', far - near)], 'far_share')
    shares = w.add('Add', [shares, w.constant('near', near)], 'shares')
    on_map = w.add('Unsqueeze', [on_map, 'axis_3'], 'on_map_row')
    shares = w.add('Mul', [shares, on_map], 'known_shares')
    x_index, y_index = w.scalar('x', 0, np.int64), w.scalar('y', 1, np.int64)
    of_x = w.add('Gather', [shares, x_index], 'shares_x', axis=2)
    of_y = w.add('Gather', [shares, y_index], 'shares_y', axis=2)
    of_x = w.add('Unsqueeze', [of_x, w.indices('axes_2_4', [2, 4])], 'shares_x_outer')
    of_y = w.add('Unsqueeze', [of_y, w.indices('axes_3_5', [3, 5])], 'shares_y_outer')
    shares = w.add('Mul', [of_y, of_x], 'patch_shares')
    flat = w.indices('patch_matrix', [0, top_k, taps**2, reach**2])
    shares = w.add('Reshape', [shares, flat], 'patch_shares_flat')
    shares = w.cast(shares, dtype, 'patch_weights')

    # The texels themselves: (B, K, reach ** 2, C).
    column = w.add('Gather', [known, x_index], 'column', axis=2)
    row = w.add('Gather', [known, y_index], 'row', axis=2)
    row = w.add('Mul', [row, w.scalar('row_length', shape.width)], 'row_start')
    row = w.add('Unsqueeze', [row, 'axis_3'], 'row_starts')
    column = w.add('Unsqueeze', [column, w.indices('axis_2', [2])], 'columns')
    index = w.cast(w.add('Add', [row, column], 'texel_number'), np.int64, 'texel_index')
    list_of_all = w.indices('texel_list', [0, top_k * reach**2, 1])
    index = w.add('Reshape', [index, list_of_all], 'texel_indices')
    x = w.add('GatherND', [texels, index], 'touched_texels', batch_dims=1)
    if real is not None:
        x = real(x, texels)
    patches = w.indices('patches_of_texels', [0, top_k, reach**2, shape.channels])
    x = w.add('Reshape', [x, patches], 'patches')
    x = w.add('MatMul', [shares, x], 'taps')
    return w.add('Reshape', [x, w.indices('row_of_taps', [0, top_k, -1])], 'samples')


def refine_points(
    w: GraphWriter, saliency: str, points: str, name: str, *, size: tuple[int, int], top_k: int
) -> str:
    """Write `networks.geometry.refine` as nodes: (B, 1, H, W), (B, K, 2) -> (B, K, 2), `name`."""
    height, width = size
    y, x = np.mgrid[-REFINE_RADIUS : REFINE_RADIUS + 1, -REFINE_RADIUS : REFINE_RADIUS + 1]
    window = np.stack([x.ravel(), y.ravel()], -1).astype(np.float32)
    taps = len(window)
    values = w.add(
        'Reshape', [saliency, w.indices('pixel_list', [0, height * width, 1])], 'saliency_list'
    )
    lowest = w.scalar('first_middle', REFINE_RADIUS)
    highest = np.array([width - 1, height - 1], np.float32) - REFINE_RADIUS
    last = w.constant('last_middle', highest)
    steps = w.constant('step_of_axes', np.array([[1], [width]], np.float32))
    offsets = w.constant('window_offsets', (window @ [1, width]).astype(np.float32))
    slopes = [
        w.constant(f'slope_{axis}', (row / REFINE_SPREAD**2).astype(np.float32))
        for axis, row in zip('xy', window.T, strict=True)
    ]
    squares = (window**2).sum(-1) / (2 * REFINE_SPREAD**2)
    falloff = w.constant('falloff', squares.astype(np.float32))
    taken = w.constant('window', window)
    all_taps = w.indices('all_taps', [0, top_k * taps, 1])
    by_point = w.indices('taps_by_point', [0, top_k, taps])
    for step in range(REFINE_STEPS):
        prefix = f'refine{step}'
        middle = w.add('Round', [points], f'{prefix}.rounded')
        middle = w.add('Max', [middle, lowest], f'{prefix}.low')
        middle = w.add('Min', [middle, last], f'{prefix}.middle')
        number = w.add('MatMul', [middle, steps], f'{prefix}.number')
        number = w.add('Add', [number, offsets], f'{prefix}.numbers')
        index = w.cast(number, np.int64, f'{prefix}.index')
        index = w.add('Reshape', [index, all_taps], f'{prefix}.indices')
        salient = w.add('GatherND', [values, index], f'{prefix}.values', batch_dims=1)
        salient = w.add('Reshape', [salient, by_point], f'{prefix}.salient')
        away = w.add('Sub', [points, middle], f'{prefix}.away')
        # Not one product: OpenVINO 2026.4 fuses it with the previous one and crashes.
        parts = [f'{prefix}.away_x', f'{prefix}.away_y']
        across, down = w.add_many('Split', [away], parts, axis=2)
        across = w.add('Mul', [across, slopes[0]], f'{prefix}.near_x')
        down = w.add('Mul', [down, slopes[1]], f'{prefix}.near_y')
        near = w.add('Add', [across, down], f'{prefix}.near')
        near = w.add('Sub', [near, falloff], f'{prefix}.nearness')
        logits = w.add('Add', [salient, near], f'{prefix}.logits')
        weights = w.add('Softmax', [logits], f'{prefix}.weights', axis=2)
        moved = w.add('MatMul', [weights, taken], f'{prefix}.moved')
        is_last = step == REFINE_STEPS - 1
        points = w.add('Add', [middle, moved], name if is_last else f'{prefix}.points')
    return points
