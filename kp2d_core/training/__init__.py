"""Self-supervised training: photographs become pairs, pairs teach the network."""
