#!/usr/bin/env python3
"""Launcher for a checkout: `python cli.py run demo "Hello"` is `pyllm run demo "Hello"`."""

from pyllm.__main__ import main

if __name__ == "__main__":
    main()
