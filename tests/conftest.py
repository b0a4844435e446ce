"""Settings for all tests."""

import os

# Before torch is imported. Tiny products gain nothing from a second thread, and two threads on a
# machine that others use too spend their time waiting for each other. A proof may set its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
