"""Errors of files. Other mistakes of a user are ValueErrors."""


class FileError(Exception):
    """A file is missing, damaged or of another format; the message is one sentence."""


class ModelError(FileError):
    """A model could be opened but cannot be run."""
