"""Whole prompts through a model with random weights: seconds, tokens a second, peak memory.

The same as `hybridkv bench prefill`.

python bench/prefill.py --help
"""

import sys

from hybridkv.cli import main

if __name__ == "__main__":
    main(["bench", "prefill", *sys.argv[1:]])
