"""DeepSeek-V4: windows, compressed entries, index and sparse attention."""
