"""The backends for NVIDIA GPUs, imported as `flashsim.backends`; each is imported at first use."""
