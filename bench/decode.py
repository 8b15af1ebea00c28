"""Decode steps of a whole model with random weights: by context, by batch, with and without a budget.

The same as `hybridkv bench decode`, without typer.

python bench/decode.py --help
"""

from hybridkv.bench.script import main

if __name__ == "__main__":
    main("decode", __doc__)
