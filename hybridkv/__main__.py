"""`python -m hybridkv` is `hybridkv`."""

from hybridkv.cli import main

if __name__ == "__main__":
    main()
