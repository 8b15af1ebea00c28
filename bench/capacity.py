"""How many long requests are resident at once in a fixed amount of memory.

The same as `hybridkv bench capacity`, without typer.

python bench/capacity.py --help
"""

from hybridkv.bench.script import main

if __name__ == "__main__":
    main("capacity", __doc__)
