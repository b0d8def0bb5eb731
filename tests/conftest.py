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


def pytest_collection_modifyitems(items):
    """Engines first: at the end one test process would wait while the other starts them."""
    items.sort(key=lambda item: (item.path.stem, "slow" in item.keywords) != ("test_vllm", True))
