import sys
import tempfile

import pytest


@pytest.fixture(autouse=True)
def forget_modules_of_temporary_files():
    """So that each test may have a rewards.py of its own: a name stands for one module."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(tempfile.gettempdir()):
            del sys.modules[name]
