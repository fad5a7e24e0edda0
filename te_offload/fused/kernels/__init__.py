"""Kernels of the fused grouped MLP. Holds none yet: on Blackwell the kernels are Transformer Engine's, elsewhere ops run
unfused. Nothing in the package imports this room.
"""
