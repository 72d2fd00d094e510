"""The one error type that is not a ValueError: a file that cannot be used."""


class FileError(Exception):
    """A file is missing, damaged, foreign or of the wrong shape; the message is one sentence."""
