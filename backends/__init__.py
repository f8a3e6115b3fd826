"""Backends for NVIDIA GPUs, imported as `flashsim.backends`; each is loaded at first use."""
