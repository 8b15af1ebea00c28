"""Decode steps of a whole model with random weights: by context, by batch, with and without a budget.

The same as `hybridkv bench decode`.

python bench/decode.py --help
"""

import sys

from hybridkv.cli import main

if __name__ == "__main__":
    main(["bench", "decode", *sys.argv[1:]])
