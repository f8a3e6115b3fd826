"""The backends for real NVIDIA GPUs, imported as `flashsim.backends`; each loads at first use."""
