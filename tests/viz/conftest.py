"""What all tests of pictures share: no window opens, and every figure is closed."""

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

mpl.use("Agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")
