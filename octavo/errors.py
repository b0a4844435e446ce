"""The root of every error that Octavo raises on purpose.

Each package keeps its own errors in its `errors.py`, derived from these two. A message names the
value, the limit and the option that changes it.
"""


class OctavoError(Exception):
    """Any error that Octavo raises on purpose."""


class InvalidRequest(OctavoError, ValueError):
    """The caller's input cannot be honoured; nothing was changed.

    `param` is the name of the offending field where there is one, `code` a word that programs look for.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


CONTEXT_EXCEEDED = "context_length_exceeded"
"""The code of a request that has or asks for more tokens than the context holds, as OpenAI has it."""
