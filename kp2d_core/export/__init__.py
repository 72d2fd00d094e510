"""The ONNX graph of KeyPointNet, written from the weights; precisions; engines."""
