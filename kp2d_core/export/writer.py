"""A thin hand for writing ONNX graphs: add nodes and constants, get names back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from kp2d_core.version import __version__

# Read alike by every TensorRT from 10.3 on, OpenVINO and ONNX Runtime.
OPSET = 17
IR_VERSION = 8


class GraphWriter:
    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def add(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """A node with one output; the name is the node's and the output's."""
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
