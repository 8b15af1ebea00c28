"""Every error a user can cause. Each message says what was asked, what there is, and what to change."""


class HybridKVError(ValueError):
    """Base of all errors that are the caller's to mend; on the command line, one line and exit code 2."""


class ModelFileError(HybridKVError):
    """A model file that is missing, broken, hostile, or of a kind that is never loaded."""


class UnsupportedModel(ModelFileError):
    """A well-formed model of an architecture, or with a feature, that hybridkv does not run."""


class RequestError(HybridKVError):
    """A prompt or a parameter that cannot be served."""


class OutOfPages(HybridKVError):
    """The page pool has fewer free pages than a step needs. Raised before anything is changed."""

    def __init__(self, needed: int, free: int, total: int, pool: str = "") -> None:
        self.needed, self.free, self.total = needed, free, total
        where = f" in pool '{pool}'" if pool else ""
        super().__init__(
            f"need {needed} pages, {free} of {total} are free{where}; "
            "lower max_requests or max_context, give more memory, or use kv_dtype='bf16'"
        )


class OutOfPagesElsewhere(OutOfPages):
    """Another rank's pool has fewer free pages than are needed. Raised before anything is changed."""

    def __init__(self) -> None:
        self.needed = self.free = self.total = 0
        HybridKVError.__init__(
            self,
            "another rank has too few free pages, since its heads keep more; lower max_requests or max_context, give "
            "more memory, or choose a policy that spreads the budget evenly ('snapkv', 'keydiff')",
        )
