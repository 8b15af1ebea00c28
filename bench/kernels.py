"""Every op alone at a model's widths: time, bytes or operations, share of the floor, peers.

The same as `hybridkv bench kernels`, without typer.

python bench/kernels.py --help
"""

from hybridkv.bench.script import main

if __name__ == "__main__":
    main("kernels", __doc__)
