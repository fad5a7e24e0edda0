"""A small language model with a mixture-of-experts layer, trained on real text: what `te-offload demo` runs.

In: a configuration. Out: losses, digests of gradients, records of steps. Keeps true: the same seed gives the same bits on
one machine. Does not: print, or write files.
"""
