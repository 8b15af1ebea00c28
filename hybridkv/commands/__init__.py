"""The commands of `hybridkv`, one file each. torch is imported when one runs, so that help is quick."""
