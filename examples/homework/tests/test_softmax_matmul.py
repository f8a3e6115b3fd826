import pytest
import torch
from softmax_matmul.softmax_matmul import softmax_matmul

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("d1", [64, 100])
def test_softmax_matmul(d1):
    torch.manual_seed(0)
    x = torch.randn(2, d1, 96, device="cuda")
    v = torch.randn(2, 96, 64, device="cuda")
    torch.testing.assert_close(softmax_matmul(x, v), torch.softmax(x, -1) @ v, rtol=1e-3, atol=1e-3)
