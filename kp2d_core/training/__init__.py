"""Self-supervised training on pairs of views made from photographs."""
