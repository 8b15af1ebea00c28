"""How many long requests are resident at once in a fixed amount of memory.

The same as `hybridkv bench capacity`.

python bench/capacity.py --help
"""

import sys

from hybridkv.cli import main

if __name__ == "__main__":
    main(["bench", "capacity", *sys.argv[1:]])
