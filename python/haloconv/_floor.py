"""The oldest Python and torch that haloconv runs on: the only place where they are written.

setup.py executes this file, so it must not import anything.
"""

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 11)
