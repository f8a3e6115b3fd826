"""Real NVIDIA GPUs, imported as `flashsim.backends`; a backend loads when it is asked for."""
