"""Merging partial attention on a GPU is what the library's own merge says, rounded once."""

import pytest

import flashsim

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("total", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [128, 64, 24, 7])
def test_the_kernel_merges_rows_in_place(width, total):
    from flashsim.backends.cupy_gpu.merge import merge_into

    torch.manual_seed(0)
    kinds = {"device": "cuda", "dtype": getattr(torch, total)}
    whole = torch.randn((2, 3, 70, width), **kinds)
    whole_lse = torch.randn((2, 3, 70), device="cuda")
    part = torch.randn((2, 3, 37, width), device="cuda", dtype=torch.bfloat16)
    part_lse = torch.randn((2, 3, 37), device="cuda")
    whole_lse[0, 0, 33] = part_lse[0, 0, 0] = part_lse[0, 0, 1] = -torch.inf
    whole[0, 0, 33] = part[0, 0, 0] = part[0, 0, 1] = 0
    before, before_lse = whole.clone(), whole_lse.clone()
    merge_into(whole[:, :, 33:], whole_lse[:, :, 33:], part, part_lse)
    given = (before[:, :, 33:], before_lse[:, :, 33:], part, part_lse)
    out, lse = flashsim.merge(*(x.float().cpu().numpy() for x in given))
    eps = torch.finfo(getattr(torch, total)).eps
    torch.testing.assert_close(
        whole[:, :, 33:].float().cpu(), torch.from_numpy(out), rtol=eps, atol=1e-6
    )
    torch.testing.assert_close(whole_lse[:, :, 33:].cpu(), torch.from_numpy(lse))
    torch.testing.assert_close(whole[:, :, :33], before[:, :, :33], rtol=0, atol=0)
    torch.testing.assert_close(whole_lse[:, :, :33], before_lse[:, :, :33], rtol=0, atol=0)
