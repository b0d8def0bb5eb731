import sys

import pytest


@pytest.fixture(autouse=True)
def forget_modules_of_a_test(tmp_path_factory):
    """So that each test may have a rewards.py of its own: a name stands for one module."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    folder = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(folder):
            del sys.modules[name]
