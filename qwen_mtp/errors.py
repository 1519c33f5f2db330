"""Every error this package raises on purpose."""


class QwenMtpError(Exception):
    """Base class; catch this to catch them all. The message is one line with the remedy."""


class CheckpointError(QwenMtpError, ValueError):
    """The checkpoint is not what the exporter can read."""


class ExportError(QwenMtpError):
    """The package could not be made: disk, memory or an unusable combination of options."""


class PackageError(QwenMtpError, ValueError):
    """A package directory contradicts its manifest."""


class RequestError(QwenMtpError, ValueError):
    """A prompt or a parameter that no package could serve, or that this one cannot."""


class VerificationError(QwenMtpError):
    """A check of ``verify`` failed; commands exit with 3."""


class MissingExtraError(QwenMtpError, ImportError):
    """An optional dependency is not installed; the message says what to install."""
