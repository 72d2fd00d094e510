"""int8 graphs with unsigned codes: the same numbers, and OpenVINO convolves them faster."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from kp2d_core.export.graph import ZERO_CODE


def with_unsigned_codes(graph: bytes) -> bytes:
    """All activations share one zero, code 0 of -128..127; as 128 of 0..255 it is the same.

    Only signed codes run on TensorRT, which is why graphs are written with them.
    """
    model = onnx.load_model_from_string(graph)
    for initializer in model.graph.initializer:
        if initializer.name == ZERO_CODE:
            initializer.CopyFrom(numpy_helper.from_array(np.asarray(128, np.uint8), ZERO_CODE))
    unsigned: bytes = model.SerializeToString()
    return unsigned
