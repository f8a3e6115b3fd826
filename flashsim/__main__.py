"""Lets `python -m flashsim` run the `flashsim` command."""

from __future__ import annotations

from flashsim.cli import main

if __name__ == "__main__":
    main()
