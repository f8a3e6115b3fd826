import math

import pytest
import torch
from flash_attention.flash_attention import FlashAttentionPytorch, FlashAttentionTriton

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = pytest.mark.parametrize("is_causal", [False, True])


def reference(q, k, v, is_causal):
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        s = s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def inputs(device):
    torch.manual_seed(0)
    return [torch.randn(2, 128, 64, device=device, requires_grad=True) for _ in range(3)]


def forward(function, device, is_causal):
    q, k, v = inputs(device)
    o = function.apply(q, k, v, is_causal)
    right, right_lse = reference(q, k, v, is_causal)
    (lse,) = [x for x in o.grad_fn.saved_tensors if x.shape == (2, 128)]
    torch.testing.assert_close(o, right, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse, right_lse, rtol=1e-2, atol=1e-2)


def backward(function, device, is_causal):
    q, k, v = inputs(device)
    do = torch.randn(2, 128, 64, device=device)
    mine = torch.autograd.grad(function.apply(q, k, v, is_causal), (q, k, v), do)
    right = torch.autograd.grad(reference(q, k, v, is_causal)[0], (q, k, v), do)
    for got, want in zip(mine, right, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_forward_pytorch():
    forward(FlashAttentionPytorch, "cpu", False)


@CASES
def test_backward_pytorch(is_causal):
    backward(FlashAttentionPytorch, "cpu", is_causal)


@gpu
@CASES
def test_forward_triton(is_causal):
    forward(FlashAttentionTriton, "cuda", is_causal)


@gpu
@CASES
def test_backward_triton(is_causal):
    backward(FlashAttentionTriton, "cuda", is_causal)
