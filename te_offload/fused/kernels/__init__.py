"""Kernels of the fused grouped MLP: `interface` says what they compute, `reference` computes it in torch arithmetic,
`sm90` on Hopper through QuACK's grouped GEMM. On Blackwell the kernels are Transformer Engine's.

In: see `interface`. Out: see there. Keeps true: `sm90` and `sm90_device` are imported only where quack-kernels is
installed. Does not: know of ops, or of offloading.
"""
