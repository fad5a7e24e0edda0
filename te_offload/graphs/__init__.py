"""CUDA graphs: capture, guards, replay, teardown. Holds nothing yet. Nothing in the package imports this room."""
