"""`make run`: a camera, the node, their figures on a live page."""
