"""Whole prompts through a model with random weights: seconds, tokens a second, peak memory.

The same as `hybridkv bench prefill`, without typer.

python bench/prefill.py --help
"""

from hybridkv.bench.script import main

if __name__ == "__main__":
    main("prefill", __doc__)
