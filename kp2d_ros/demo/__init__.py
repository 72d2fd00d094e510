"""`make run`: a camera, the node, and a live page with their figures."""
