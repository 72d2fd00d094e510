"""ONNX graphs of KeyPointNet, written from the weights; precisions; TensorRT engines."""
