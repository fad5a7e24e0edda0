"""Tests leave half of the cores to what runs beside them: compiles of kernels, or processes of their own. Torch reads this
as it is imported, for all threads: bits may differ between numbers of them.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
