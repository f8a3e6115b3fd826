"""GPUs, and problems that kernels are compiled for without a GPU."""

from flashsim.backends.launch.kernel import Gpu

KIB = 1024
#: GPUs with the properties that launch arithmetic uses: shared memory per block, and L2.
GPUS = {
    "sm_80": Gpu("A100", (8, 0), 163 * KIB, 40 << 20),
    "sm_86": Gpu("RTX 3090", (8, 6), 99 * KIB, 6 << 20),
    "sm_89": Gpu("RTX 4090", (8, 9), 99 * KIB, 72 << 20),
    "sm_90": Gpu("H200", (9, 0), 227 * KIB, 60 << 20),
    "sm_100": Gpu("B200", (10, 0), 227 * KIB, 126 << 20),
    "sm_120": Gpu("RTX 5090", (12, 0), 99 * KIB, 96 << 20),
}
A100, H200 = GPUS["sm_80"], GPUS["sm_90"]
#: The options that make a problem of 500 queries and keys irregular.
ODD = {
    **{"heads": 4, "kv_heads": 2, "dtype": "float16", "window": (30, 5), "softcap": 3.0},
    **{"cu_seqlens_q": (0, 200, 500), "cu_seqlens_k": (0, 300, 500)},
}


def passes_of(family, problem, algorithm="", *, tiling=None, gpu=H200, report="", **more):
    """Return the launches of a family's forward, or of its backward with an algorithm."""
    given = problem, tiling, gpu, "ascending", report
    if not algorithm:
        return family.forward_passes(*given, **more)
    return family.backward_passes(*given, algorithm, **more)


def kernel_of(family, problem, stage, **how):
    """Return a stage's kernel, of the fused backward if that has such a stage."""
    algorithm = {"forward": "", "dkdv": "flash2", "dq": "flash2"}.get(stage, "flash2-fused")
    made = passes_of(family, problem, algorithm, **how)
    (kernel,) = (one.kernel for one in made if one.stage.name == stage)
    return kernel
