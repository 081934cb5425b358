"""Typed errors. Each message says what was got, what is supported and what to do."""

_LONGEST = 2000


def printable(text: str) -> str:
    """`text` on one line, with what a terminal would obey (control characters, marks of direction) escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class NibbleLMError(Exception):
    """Base of every error this package raises on purpose; the CLI prints it as one line and exits with 1."""

    def __str__(self) -> str:
        text = printable(super().__str__())  # messages quote files of strangers
        return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


class ConfigError(NibbleLMError):
    """config.json or generation_config.json asks for something that is not supported, or is malformed."""


class CheckpointError(NibbleLMError):
    """A weight file, an index or a folder is missing, malformed, hostile or incomplete."""


class ConvertError(NibbleLMError):
    """A conversion cannot start or go on (destination exists, disk full, unknown scheme ...)."""


class TokenizerError(NibbleLMError):
    """A tokenizer or chat template is missing, unreadable or cannot do what was asked."""


class DeviceError(NibbleLMError):
    """A device, an extension or memory that was asked for is not there."""


class RequestError(NibbleLMError):
    """A generation request is invalid: prompt too long, parameter out of range, unknown argument."""


class EngineFullError(RequestError):
    """As many requests are unfinished as there may be: it can be entered once one of them has ended."""


class SchemaError(RequestError):
    """A JSON schema, a regular expression or a grammar for an answer cannot be followed."""


class EngineError(NibbleLMError):
    """The engine's thread has ended, and with it every request: it was closed, or a step failed."""
