"""The errors that are not ValueErrors: files that cannot be used."""


class FileError(Exception):
    """A file is missing, damaged, foreign or of the wrong shape; the message is one sentence."""


class ModelError(FileError):
    """A model looked right when it was opened, and cannot be run."""
