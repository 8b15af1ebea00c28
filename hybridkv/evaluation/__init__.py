"""What eviction costs in answers: generated tasks, each asked with the full cache and with a part of it."""
