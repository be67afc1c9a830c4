"""Errors that a user can cause or meet. Each message says what was found, what was expected, and what to do.

`commands` turns every PyllmError into one line on stderr and a non-zero status; a traceback reaches nobody.
"""


class PyllmError(Exception):
    """Base of all errors that pyllm raises on purpose. `str(error)` is one line."""


class UsageError(PyllmError):
    """An argument of a call or a command-line option is wrong."""


class ModelFileError(PyllmError):
    """A model file is missing, damaged, or not what it claims to be."""


class UnsupportedError(ModelFileError):
    """A sound model file needs something pyllm does not have: an architecture, a block type, a tokeniser."""


class TemplateError(PyllmError):
    """A chat template is missing, malformed, refused by the sandbox, or raised an error of its own."""


class SamplingError(PyllmError):
    """A row of logits from which no token can be chosen: NaN everywhere, or overflowed."""


class ContextError(PyllmError):
    """A prompt or a generation does not fit into the context."""


class DeviceError(PyllmError):
    """A device is missing, or failed while running queued work. The engine that met it can only be closed."""


class SessionError(PyllmError):
    """A session file is damaged, or of another model, engine or version, or cannot be read or written."""


class StaleKVError(PyllmError):
    """A check on the device found inputs or K/V rows that are not the sequence's own. Nothing of that step is shown."""


class ShapeError(PyllmError, ValueError):
    """An op was called with arrays that do not fit together: our own mistake, or that of a kernel test."""


class DownloadError(PyllmError):
    """A model could not be fetched, or is not the file that was pinned."""
