"""Stanford CS336, assignment 2: its tests of an autograd function, from their published text.

https://github.com/stanford-cs336/assignment2-systems/blob/main/tests/test_attention.py
"""

import torch

from flashsim.torch import FlashAttention
from outside.cases import Test, product

TITLE = "Stanford CS336, assignment 2"
TOLERANCES = {"rtol": 1e-2, "atol": 1e-2}


def tests(device: str, whole: bool) -> list[Test]:
    """Return the tests; on a GPU, those of the Triton function."""
    causal = (False, True) if device == "cuda" else (False,)
    kind = "triton" if device == "cuda" else "pytorch"
    return [
        Test(f"flash_forward_pass_{kind}", forward, product(is_causal=causal, device=[device])),
        Test(f"flash_backward_{kind}", backward, product(is_causal=causal, device=[device])),
    ]


def inputs(device: str) -> list[torch.Tensor]:
    """Return q, k, v and the gradient of the output: (batch 4, n 128, d 64), float32."""
    torch.manual_seed(0)
    return [torch.randn(4, 128, 64, device=device, requires_grad=i < 3) for i in range(4)]


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool):
    """Return output and LSE by torch's operators."""
    scores = q @ k.mT * 64**-0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e6)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def forward(is_causal: bool, device: str) -> None:
    """Check the output, and that exactly one saved tensor has the LSE's shape and value."""
    q, k, v, _ = inputs(device)
    out = FlashAttention.apply(q, k, v, is_causal)
    wanted, lse = expected(q, k, v, is_causal)
    rows = [x for x in out.grad_fn.saved_tensors if x.shape == (4, 128)]
    assert len(rows) == 1, f"{len(rows)} saved tensors of shape (4, 128)"
    torch.testing.assert_close(out, wanted, **TOLERANCES)
    torch.testing.assert_close(rows[0], lse, **TOLERANCES)


def backward(is_causal: bool, device: str) -> None:
    """Check the gradients of q, k and v."""
    *qkv, dout = inputs(device)
    got = torch.autograd.grad(FlashAttention.apply(*qkv, is_causal), qkv, dout)
    wanted = torch.autograd.grad(expected(*qkv, is_causal)[0], qkv, dout)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCES)
