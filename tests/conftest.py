"""One thread for linear algebra, here and in child processes: tests run side by side, and waiting threads spin.

Set before numpy is first imported; a value from outside stands.
"""

from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
