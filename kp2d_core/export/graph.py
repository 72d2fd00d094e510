"""Write KeyPointNet as an ONNX graph: from a uint8 image to keypoints, scores and descriptors.

The graph is written from the weights, node by node, without torch, for any size. All runtimes use
the same graph, whole or as two: one that finds keypoints and one that describes some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from kp2d_core.architecture import (
    CELL,
    INPUT_MEAN,
    LEAKY_SLOPE,
    LOG_SIGMA_RANGE,
    inner_cells,
)
from kp2d_core.checkpoint import Checkpoint
from kp2d_core.export.onnx_writer import GraphWriter, MapShape, refine_points, sample_patches
from kp2d_core.export.quantization import (
    LEVELS,
    Convolution,
    Ranges,
    equalise,
    fold,
    quantize_weight,
)
from kp2d_core.export.source import Profile, metadata_of, output_names
from kp2d_core.geometry import scale_matrix, warp_points

TEXELS = 'texels'  # the features of which descriptors are made, as one list
ZERO_CODE = 'zero_code'  # the zero point of all activations except the image

# The smallest norm that a descriptor is divided by, as in torch.
TINY = 1e-12


def build_graph(
    checkpoint: Checkpoint,
    profile: Profile,
    ranges: Ranges | None = None,
    *,
    dense: bool | None = None,
) -> ModelProto:
    """Write the graph of a model for one profile.

    ranges  of the activations, needed for int8 (`quantization.py`)
    dense   whether to compute the last descriptor convolution on the whole map and then sample
            it; None: whatever is faster. The result is the same.
    """
    if profile.precision == 'int8' and ranges is None:
        raise ValueError('int8 needs the ranges of the activations: calibrate first')
    writer = NetworkWriter(checkpoint, profile, ranges)
    return writer.whole(dense_is_faster(checkpoint, profile) if dense is None else dense)


def build_parts(
    checkpoint: Checkpoint, profile: Profile, ranges: Ranges | None, described: int
) -> tuple[ModelProto, ModelProto]:
    """Write the network as two graphs, so that only keypoints that are kept are described.

    The first finds keypoints; its output `texels` (B, texels, C) are the features that the second
    describes `described` keypoints of one image with, given as its inputs.
    """
    one = replace(profile, batch=1, top_k=described)
    return (
        NetworkWriter(checkpoint, profile, ranges).finding_part(),
        NetworkWriter(checkpoint, one, ranges).describing_part(),
    )


def dense_is_faster(checkpoint: Checkpoint, profile: Profile) -> bool:
    """Whether convolving the whole map is cheaper than convolving at the keypoints."""
    stride = checkpoint.architecture.descriptor_stride
    texels = (profile.height // stride) * (profile.width // stride)
    return profile.top_k > texels * (0.12 if profile.precision == 'int8' else 0.5)


class NetworkWriter:
    """Writes the nodes in the order in which an image passes them."""

    def __init__(self, checkpoint: Checkpoint, profile: Profile, ranges: Ranges | None) -> None:
        self.checkpoint = checkpoint
        self.architecture = checkpoint.architecture
        self.profile = profile
        self.ranges = ranges if profile.precision == 'int8' else None
        self.dtype = np.float16 if profile.precision == 'fp16' else np.float32
        self.layers = self.architecture.layers()
        self.convolutions = fold(checkpoint, mono=profile.mono)
        if self.ranges is not None:
            self.convolutions, self.ranges = equalise(
                self.convolutions, self.ranges, self.architecture
            )
        self.writer = GraphWriter()
        self.zero = self.writer.scalar(ZERO_CODE, 0, np.int8) if self.ranges else ''
        self.reals: dict[str, str] = {}  # int8 tensor -> the dequantized tensor
        self.scales: dict[str, str] = {}  # int8 tensor -> the scale of its codes

    def whole(self, dense: bool) -> ModelProto:
        features = self.find()
        self.describe(self.texels_of(self.last_layer(features) if dense else features), dense)
        return self.model(['image'], output_names(self.architecture))

    def finding_part(self) -> ModelProto:
        found = [name for name in output_names(self.architecture) if name != 'descriptors']
        self.texels_of(self.find())
        return self.model(['image'], [*found, TEXELS])

    def describing_part(self) -> ModelProto:
        if self.ranges is not None:
            self.scales[TEXELS] = self.scale_of(TEXELS, self.ranges['convFaa'])
        self.describe(TEXELS, dense=False)
        return self.model([TEXELS, 'keypoints'], ['descriptors'])

    def find(self) -> str:
        """Compute the keypoints; return the features that descriptors are made of."""
        early, half, skip, trunk = self.encode(self.enter())
        if self.architecture.cell == CELL:
            scores, shifts = (self.head(f'conv{h}a', f'conv{h}b', trunk) for h in 'DP')
            features = self.convolve('convFaa', self.descriptor_features(trunk, skip))
            log_sigma = ''
        else:
            features = self.decode(trunk, skip)
            found = self.head('convDa', 'convDb', features)
            scores, shifts, log_sigma = self.writer.add_many(
                'Split', [found, self.writer.indices('head_parts', [1, 2, 1])],
                ['score_logits', 'shift_map', 'log_sigma'], axis=1,
            )  # fmt: skip
        self.find_keypoints(scores, shifts, log_sigma, (early, half))
        return features

    def model(self, inputs: Sequence[str], outputs: Sequence[str]) -> ModelProto:
        """Declare the inputs and outputs, and wrap up the nodes."""
        profile = self.profile
        batch = 'batch' if profile.batch is None else profile.batch
        texels = (
            TensorProto.INT8
            if self.ranges is not None
            else helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        )
        rows, columns = self.map_size
        channels = self.convolutions['convFbb'].weight.shape[1]
        image = [profile.height, profile.width, profile.channels]
        known: dict[str, tuple[int, list[int]]] = {
            'image': (TensorProto.UINT8, image),
            'keypoints': (TensorProto.FLOAT, [profile.top_k, 2]),
            'scores': (TensorProto.FLOAT, [profile.top_k]),
            'descriptors': (
                TensorProto.FLOAT, [profile.top_k, self.architecture.descriptor_size]
            ),
            'sigmas': (TensorProto.FLOAT, [profile.top_k]),
            TEXELS: (texels, [rows * columns, channels]),
        }  # fmt: skip
        given, found = (
            [
                helper.make_tensor_value_info(name, known[name][0], [batch, *known[name][1]])
                for name in names
            ]
            for names in (inputs, outputs)
        )
        return self.writer.model(given, found, metadata_of(self.checkpoint, profile))

    def enter(self) -> str:
        """Subtract the mean of the pixels; the factor is in the weights of the first layer."""
        w = self.writer
        x = w.cast('image', np.float32, 'pixels')  # first: TensorRT can only cast uint8
        x = w.add('Transpose', [x], 'planes', perm=[0, 3, 1, 2])
        weight, bias = self.convolutions['conv1a']
        if self.ranges is None:
            x = w.add('Sub', [x, w.scalar('mean', 255 * INPUT_MEAN)], 'centred')
            if self.dtype == np.float16:  # whose smallest numbers are too coarse for these weights
                self.convolutions['conv1a'] = Convolution(weight * 128, bias)
                x = w.add('Mul', [x, w.scalar('shrink', 1 / 128)], 'small')
            return w.cast(x, self.dtype, 'input')
        # Minus 128, a pixel is a signed byte, which quantizes without loss. The bias corrects the
        # difference of 0.5 to the mean.
        rest = np.float32(128 - 255 * INPUT_MEAN)
        self.convolutions['conv1a'] = Convolution(weight, bias + rest * weight.sum(axis=(1, 2, 3)))
        x = w.add('Sub', [x, w.scalar('mean', 128)], 'input')
        scale, zero = w.scalar('input.scale', 1), w.scalar('input.zero', 0, np.int8)
        x = w.add('QuantizeLinear', [x, scale, zero], 'input.codes')
        return w.add('DequantizeLinear', [x, scale, zero], 'input.real')

    def encode(self, x: str) -> tuple[str, str, str, str]:
        """Compute the features at 1 (or 1/2), 1/2, 1/4 and 1/8 of the resolution."""
        early = self.convolve('conv1b', self.convolve('conv1a', x))
        x = early if self.architecture.stem == 2 else self.pool(early)
        half = self.convolve('conv2b', self.convolve('conv2a', x))
        skip = self.convolve('conv3b', self.convolve('conv3a', self.pool(half)))
        return early, half, skip, self.convolve('conv4b', self.convolve('conv4a', self.pool(skip)))

    def pool(self, x: str) -> str:
        """Halve the size, rounded up if a side is odd."""
        return self.arrange(
            'MaxPool', [x], f'{x}.pooled', kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1
        )

    def join(self, coarse: str, fine: str, name: str, size: tuple[int, int] | None = None) -> str:
        """Enlarge a coarser map by pixel shuffle, and concatenate it with a finer one."""
        x = self.arrange('DepthToSpace', [coarse], f'{name}.up', blocksize=2, mode='CRD')
        if size is not None and any(side % 2 for side in size):
            w = self.writer
            bounds = [w.indices(f'{name}.{k}', v) for k, v in (('from', (0, 0)), ('to', size))]
            x = self.arrange('Slice', [x, *bounds, w.indices(f'{name}.on', [2, 3])], f'{name}.cut')
        return self.arrange('Concat', [x, fine], name, axis=1)

    def decode(self, trunk: str, skip: str) -> str:
        """Compute the decoder that all heads share in networks with cells of 4 px."""
        x = trunk
        if self.architecture.context:
            deep = self.convolve('conv5b', self.convolve('conv5a', self.pool(trunk)))
            size = self.profile.height // 8, self.profile.width // 8
            x = self.join(deep, trunk, 'with_context', size)
        x = self.convolve('convFb', self.convolve('convFa', x))
        return self.convolve('convFaa', self.join(x, skip, 'joined'))

    def convolve(self, name: str, x: str) -> str:
        """Compute a layer of the table with its LeakyReLU; for int8, quantize its output."""
        w, layer = self.writer, self.layers[name]
        weight = self.weight(name)
        bias = w.constant(f'{name}.bias', self.convolutions[name].bias.astype(self.dtype))
        x = w.add(
            'Conv', [self.real(x), weight, bias], name, kernel_shape=[layer.kernel] * 2,
            pads=[layer.padding] * 4, strides=[layer.stride] * 2,
        )  # fmt: skip
        if layer.active:
            x = w.add('LeakyRelu', [x], f'{name}.active', alpha=LEAKY_SLOPE)
        if self.ranges is not None and layer.int8 == 'output':
            x = self.quantize(x, self.ranges[name])
        return x

    def weight(self, name: str) -> str:
        w, convolution = self.writer, self.convolutions[name]
        if self.ranges is None or self.layers[name].int8 == 'none':
            return w.constant(f'{name}.weight', convolution.weight.astype(self.dtype))
        codes, scales = quantize_weight(convolution.weight)
        inputs = [
            w.constant(f'{name}.weight.codes', codes),
            w.constant(f'{name}.weight.scales', scales),
            w.constant(f'{name}.weight.zeros', np.zeros(len(scales), np.int8)),
        ]
        return w.add('DequantizeLinear', inputs, f'{name}.weight', axis=0)

    def quantize(self, x: str, largest: float) -> str:
        """Quantize to int8 codes, signed and symmetric: the only kind that all runtimes accept."""
        scale = self.scale_of(x, largest)
        codes = self.writer.add('QuantizeLinear', [x, scale, self.zero], f'{x}.codes')
        self.scales[codes] = scale
        return codes

    def scale_of(self, x: str, largest: float) -> str:
        return self.writer.scalar(f'{x}.scale', largest / LEVELS)

    def arrange(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """Add a node that moves or selects values. Codes stay codes with the same scale.

        Between a dequantization and a quantization, OpenVINO 2026.4 would round to integers.
        """
        name = self.writer.add(operator, inputs, name, **attributes)
        if inputs[0] in self.scales:
            self.scales[name] = self.scales[inputs[0]]
        return name

    def real(self, x: str) -> str:
        """Dequantize the tensor if it holds codes."""
        if x not in self.scales:
            return x
        if x not in self.reals:
            self.reals[x] = self.real_like(x, x)
        return self.reals[x]

    def real_like(self, x: str, codes: str) -> str:
        """Dequantize a tensor with the scale of other codes."""
        inputs = [x, self.scales[codes], self.zero]
        return self.writer.add('DequantizeLinear', inputs, f'{x}.real')

    def head(self, first: str, last: str, trunk: str) -> str:
        """Compute the score or location head, as float32."""
        x = self.convolve(last, self.convolve(first, trunk))
        return self.writer.cast(x, np.float32, f'{last}.float')

    def find_keypoints(
        self, scores: str, shifts: str, log_sigma: str, early: tuple[str, str]
    ) -> None:
        """Select the best cells: the outputs `scores`, `keypoints` and `sigmas`."""
        w, profile = self.writer, self.profile
        cell = self.architecture.cell
        rows, columns = profile.height // cell, profile.width // cell
        x = w.add('Sigmoid', [scores], 'score_map')
        inner = inner_cells(rows, columns)[None, None].astype(np.float32)
        x = w.add('Mul', [x, w.constant('inner_cells', inner)], 'inner_scores')
        x = w.add('Reshape', [x, w.indices('cell_list', [0, profile.cells])], 'cell_scores')
        top_k = w.indices('top_k', [profile.top_k])
        _, cells = w.add_many('TopK', [x, top_k], ['scores', 'cells'], axis=1, sorted=1)
        index = w.add('Unsqueeze', [cells, w.indices('axis_end', [2])], 'cell_index')

        x = w.add(
            'Reshape', [shifts, w.indices('cell_planes', [0, 2, profile.cells])], 'shift_planes'
        )
        x = w.add('Transpose', [x], 'shifts', perm=[0, 2, 1])
        x = w.add('Tanh', [w.add('GatherND', [x, index], 'kept_shifts', batch_dims=1)], 'offsets')
        reach = w.scalar('offset_range', self.architecture.offset_range)
        x = w.add('Mul', [x, reach], 'pixel_offsets')
        row, column = np.divmod(np.arange(profile.cells), columns)
        grid = np.stack([column, row], axis=1)
        centres = warp_points(grid, scale_matrix(cell, cell)).astype(np.float32)
        centre = w.add('Gather', [w.constant('centres', centres), cells], 'kept_centres', axis=0)
        x = w.add('Add', [centre, x], 'free_keypoints')
        x = w.add('Max', [x, w.scalar('first_pixel', 0)], 'low_keypoints')
        last = w.constant(
            'last_pixel', np.array([profile.width - 1, profile.height - 1], np.float32)
        )
        if not self.architecture.saliency:
            w.add('Min', [x, last], 'keypoints')
        else:
            x = w.add('Min', [x, last], 'coarse_keypoints')
            size = profile.height, profile.width
            refine_points(w, self.saliency(*early), x, 'keypoints', size=size, top_k=profile.top_k)
        if log_sigma:
            low, high = LOG_SIGMA_RANGE
            x = w.add(
                'Reshape', [log_sigma, w.indices('cell_column', [0, profile.cells, 1])], 'spreads'
            )
            x = w.add('GatherND', [x, index], 'kept_spreads', batch_dims=1)
            x = w.add('Reshape', [x, w.indices('kept_list', [0, profile.top_k])], 'spread_list')
            x = w.add('Clip', [x, w.scalar('least', low), w.scalar('most', high)], 'log_sigmas')
            w.add('Exp', [x], 'sigmas')

    def saliency(self, early: str, half: str) -> str:
        """Compute the saliency map (B, 1, H, W) as float32."""
        w = self.writer
        fine = self.convolve('convSb', self.convolve('convSa', early))
        coarse = self.convolve('convSc', half)
        if self.architecture.stem == 1:
            coarse = w.add('DepthToSpace', [coarse], 'coarse_saliency', blocksize=2, mode='CRD')
        x = w.add('Add', [fine, coarse], 'both_saliencies')
        if self.architecture.stem == 2:
            x = w.add('DepthToSpace', [x], 'fine_saliency', blocksize=2, mode='CRD')
        return w.cast(x, np.float32, 'saliency')

    def descriptor_features(self, trunk: str, skip: str) -> str:
        """Compute the descriptor head without its last two layers."""
        x = self.convolve('convFa', trunk)
        if self.architecture.upsample:
            x = self.convolve('convFb', x)
            x = self.join(x, skip, 'joined')
        return x

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the map that descriptors are sampled from."""
        stride = self.architecture.descriptor_stride
        return self.profile.height // stride, self.profile.width // stride

    def last_layer(self, features: str) -> str:
        """Compute the last layer everywhere, not only at the keypoints."""
        return self.convolve('convFbb', features)

    def texels_of(self, x: str) -> str:
        """List the texels of a map with all their channels: (B, texels, C), `texels`."""
        rows = self.writer.indices('planes_of_texels', [0, 0, -1])
        x = self.arrange('Reshape', [x, rows], 'feature_planes')
        return self.arrange('Transpose', [x], TEXELS, perm=[0, 2, 1])

    def describe(self, texels: str, dense: bool) -> None:
        """Compute the output `descriptors`, of unit length; if not `dense`, the last layer too."""
        w, profile = self.writer, self.profile
        last = self.convolutions['convFbb']
        size, channels, kernel, _ = last.weight.shape
        shape = MapShape(
            size if dense else channels, *self.map_size, profile.height, profile.width,
            self.architecture.pinned,
        )  # fmt: skip
        x = sample_patches(
            w, texels, 'keypoints', shape, profile.top_k, 0 if dense else kernel // 2,
            real=self.real_like if texels in self.scales else None, dtype=self.dtype,
        )  # fmt: skip
        if not dense:
            matrix = last.weight.transpose(2, 3, 1, 0).reshape(-1, size)
            x = w.add(
                'MatMul', [x, w.constant('convFbb.matrix', matrix.astype(self.dtype))], 'product'
            )
            x = w.add('Add', [x, w.constant('convFbb.bias', last.bias.astype(self.dtype))], 'sum')
        x = w.cast(x, np.float32, 'long_descriptors')
        length = w.add('ReduceL2', [x], 'length', axes=[-1], keepdims=1)
        length = w.add('Max', [length, w.scalar('tiny', TINY)], 'positive_length')
        w.add('Div', [x, length], 'descriptors')


def with_unsigned_codes(graph: bytes) -> bytes:
    """Replace signed codes by unsigned ones: the shared zero 0 of -128..127 becomes 128 of 0..255.

    Graphs are written with signed codes because TensorRT accepts no others.
    """
    model = onnx.load_model_from_string(graph)
    for initializer in model.graph.initializer:
        if initializer.name == ZERO_CODE:
            initializer.CopyFrom(numpy_helper.from_array(np.asarray(128, np.uint8), ZERO_CODE))
    for port in (*model.graph.input, *model.graph.output):
        if port.type.tensor_type.elem_type == TensorProto.INT8:
            port.type.tensor_type.elem_type = TensorProto.UINT8
    unsigned: bytes = model.SerializeToString()
    return unsigned
