"""What is wrong with a model's files.

ModelError              the files cannot be served; names the file, the value, and what would do
├── ModelNotFound       nothing there; says how to get it
└── PullError           a download failed, or what came is not what was expected
"""


class ModelError(Exception):
    """Raised while loading, never while serving."""


class ModelNotFound(ModelError):
    """No such name or path."""


class PullError(ModelError):
    """The model cache is as it was before the pull."""
