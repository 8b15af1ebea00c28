"""What it costs to cut a prompt to a budget, part by part.

The same as `hybridkv bench eviction`, without typer.

python bench/eviction.py --help
"""

from hybridkv.bench.script import main

if __name__ == "__main__":
    main("eviction", __doc__)
