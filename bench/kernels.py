"""Every op alone at a model's widths: time, bytes or operations, share of the floor, peers.

The same as `hybridkv bench kernels`.

python bench/kernels.py --help
"""

import sys

from hybridkv.cli import main

if __name__ == "__main__":
    main(["bench", "kernels", *sys.argv[1:]])
