"""Whether there is a C++ compiler, for tests of the compiled kernels."""

import os
import shutil

import pytest

FOUND = shutil.which(os.environ.get("CXX", "g++")) is not None


def require_compiler() -> None:
    """Skips the test where there is none, or fails where DIST_TFM_REQUIRE names it."""
    if FOUND:
        return
    reason = "no C++ compiler: install g++ or name another one in the variable CXX"
    if "compiler" in os.environ.get("DIST_TFM_REQUIRE", "").split(","):
        pytest.fail(f"DIST_TFM_REQUIRE=compiler, but {reason}")
    pytest.skip(reason)
