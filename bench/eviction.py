"""What it costs to cut a prompt to a budget, part by part.

The same as `hybridkv bench eviction`.

python bench/eviction.py --help
"""

import sys

from hybridkv.cli import main

if __name__ == "__main__":
    main(["bench", "eviction", *sys.argv[1:]])
