"""Compile the CPU engine's kernels without LLVM's optimisation, where FLASHSIM_UNOPTIMISED is set.

LLVM's optimisation takes half of the time of a compilation. The L2 model's loops would run too long
without it, and are optimised. Code on disk is loaded if it is optimised. Numba's key of such code
does not say how it was compiled. So the code that these processes save has another key, which other
processes do not look for.
"""

import os
from pathlib import Path

#: Does the same in a Python process that a test starts; others optimise, and load optimised code.
HERE_TOO = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import unoptimised;"
HERE_TOO += "unoptimised.install();"


def install():
    """Change Numba in this process, if the environment says so."""
    if not os.environ.get("FLASHSIM_UNOPTIMISED"):
        return
    from numba.core import caching, config, dispatcher, registry

    compiled, whole, none = dispatcher.Dispatcher.compile, config.OPT, type(config.OPT)(0)
    files = caching.IndexDataCacheFile
    load, save = files.load, files.save

    def load_(self, key):
        optimised = load(self, key)
        return load(self, (*key, "unoptimised")) if optimised is None else optimised

    def save_(self, key, data):
        save(self, (*key, "unoptimised"), data)

    def compile_(self, signature):
        module = self.py_func.__module__
        ours = module.startswith("flashsim.") and not module.startswith("flashsim.engines.")
        config.OPT, before = whole if ours else none, config.OPT
        try:
            return compiled(self, signature)
        finally:
            config.OPT = before

    config.OPT = none
    registry.cpu_target.target_context.codegen()  # made now, it makes machine code as fast
    dispatcher.Dispatcher.compile = compile_
    files.load, files.save = load_, save_
