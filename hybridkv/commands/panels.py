"""The panels of --help, by which options are grouped."""

PROMPT, MODEL, MEMORY, SAMPLING, OUTPUT = "Prompt", "Model", "Memory", "Sampling", "Output"
EVICTION = "Keeping only the tokens that matter"
