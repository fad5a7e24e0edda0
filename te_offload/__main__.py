"""`python -m te_offload` is `te-offload`."""

from te_offload.cli import main

main()
