"""What numba compiles, where it has no place to keep it."""

import subprocess
import sys
from pathlib import Path

from eelib.lens.cpu_kernels import summarize

ROOT = Path(__file__).parents[2]
CODE = """
import numpy as np
from numba.core import caching
caching.CacheImpl._locator_classes = []  # as with a checkout and a home that can't be written to
from eelib.lens.cpu_kernels import summarize
found = np.empty((1, 2), np.float32), np.empty((1, 2), np.int32), *np.empty((2, 1), np.float32), np.empty(1, np.int32)
found += (np.empty(1, np.int32),)
summarize(0, 1, np.array([[0, 2, 1]], np.float32), np.array([1]), np.array([0]), *found)
print(found[1].tolist(), found[4].tolist(), found[5].tolist())
"""


def test_without_a_place_for_a_cache():
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[[1, 2]] [1] [3]\n", done.stderr


def test_with_one_it_is_used():
    assert summarize.stats.cache_path
